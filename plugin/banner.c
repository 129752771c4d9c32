/* The line by which loaders recognise the library and the CUDA major it goes with, found by searching the file. */
#include "nccl_ep.h"

#define EP_TEXT_OF(v) #v
#define EP_TEXT(v) EP_TEXT_OF(v)
#ifndef EP_CUDA_TEXT
#define EP_CUDA_TEXT "13.0" /* the build says */
#endif

extern const char epBanner[];
__attribute__((used)) const char epBanner[] = "NCCL EP version " EP_TEXT(NCCL_EP_MAJOR) "." EP_TEXT(
    NCCL_EP_MINOR) "." EP_TEXT(NCCL_EP_PATCH) "+cuda" EP_CUDA_TEXT;
