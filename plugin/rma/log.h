/* Lines in NCCL's log, through the function that NCCL hands to init. Whoever decides an error writes it, once. */
#ifndef EP_RMA_LOG_H_
#define EP_RMA_LOG_H_

#include "abi.h"

void epRmaLogSet(epRmaLogger logger);
void epRmaLog(int level, const char *where, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));

#define EP_RMA_WARN(...) epRmaLog(EP_RMA_LOG_WARN, __func__, __LINE__, __VA_ARGS__)
#define EP_RMA_INFO(...) epRmaLog(EP_RMA_LOG_INFO, __func__, __LINE__, __VA_ARGS__)

#endif
