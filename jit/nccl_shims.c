/* C headers that NCCL's and CUDA's headers include and NVRTC does not have, as small as these headers need them. They
 * are texts for the compiler at run time; nothing here is compiled into the library. */
#include "bundle.h"

static const char empty[] = "";
static const char integers[] = "#pragma once\n"
                               "typedef signed char int8_t;\n"
                               "typedef unsigned char uint8_t;\n"
                               "typedef short int16_t;\n"
                               "typedef unsigned short uint16_t;\n"
                               "typedef int int32_t;\n"
                               "typedef unsigned int uint32_t;\n"
                               "typedef long long int64_t;\n" /* as libcu++ has them, which is included beside */
                               "typedef unsigned long long uint64_t;\n"
                               "typedef long long intptr_t;\n"
                               "typedef unsigned long long uintptr_t;\n"
                               "typedef long long intmax_t;\n"
                               "typedef unsigned long long uintmax_t;\n";
static const char kernelTypes[] = "#pragma once\n"
                                  "#include <stdint.h>\n"
                                  "typedef uint8_t __u8;\n"
                                  "typedef uint16_t __u16;\n"
                                  "typedef uint32_t __u32;\n"
                                  "typedef uint64_t __u64;\n"
                                  "typedef uint16_t __be16;\n"
                                  "typedef uint32_t __be32;\n"
                                  "typedef uint64_t __be64;\n";
static const char typeTraits[] = "#pragma once\n"
                                 "#include <cuda/std/type_traits>\n"
                                 "namespace std { using namespace cuda::std; }\n";
static const char algorithm[] = "#pragma once\n"
                                "#include <cuda/std/__algorithm/max.h>\n" /* CUDA 13.0 has no <cuda/std/algorithm> */
                                "#include <cuda/std/__algorithm/min.h>\n"
                                "namespace std { using cuda::std::min; using cuda::std::max; }\n";

#define SHIMS(X)               \
  X("assert.h", empty)         \
  X("errno.h", empty)          \
  X("float.h", empty)          \
  X("inttypes.h", empty)       \
  X("limits.h", empty)         \
  X("math.h", empty)           \
  X("new", empty)              \
  X("stdbool.h", empty)        \
  X("stddef.h", empty)         \
  X("stdio.h", empty)          \
  X("stdlib.h", empty)         \
  X("string.h", empty)         \
  X("time.h", empty)           \
  X("unistd.h", empty)         \
  X("sys/types.h", empty)      \
  X("stdint.h", integers)      \
  X("cassert", integers)       \
  X("cstddef", integers)       \
  X("cstdint", integers)       \
  X("cstdio", integers)        \
  X("cstdlib", integers)       \
  X("cstring", integers)       \
  X("type_traits", typeTraits) \
  X("algorithm", algorithm)    \
  X("linux/types.h", kernelTypes)

#define X(name, text) name,
static const char *const names[] = {SHIMS(X)};
#undef X
#define X(name, text) text,
static const char *const texts[] = {SHIMS(X)};
#undef X

const epBundle epNcclShimBundle = {"", 0, sizeof(names) / sizeof(names[0]), names, texts, ""};
