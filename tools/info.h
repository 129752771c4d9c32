/* The parts of ep_info. Each prints what it found, a line a thing; for what is missing one line "-- thing: what it
 * means". */
#ifndef EP_TOOLS_INFO_H_
#define EP_TOOLS_INFO_H_

void infoSection(const char *title);
void infoFound(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
void infoMissing(const char *name, const char *reason, const char *meaning);

void infoGpus(void); /* CUDA driver, GPUs, what would be launched on each */
void infoNccl(void);
void infoJit(void);    /* NVRTC, cache, embedded headers */
void infoNvlink(void); /* through NVML */
void infoNics(void);   /* through libibverbs */
void infoSums(void);   /* SMs and queue pairs of several scale-up domains, by the rates of the links */

#endif
