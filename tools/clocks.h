/* Clocks of a GPU, as NVML tells them: a measurement without them cannot be judged. */
#ifndef EP_TOOLS_CLOCKS_H_
#define EP_TOOLS_CLOCKS_H_

typedef struct epClocks {
  unsigned smLow, smHigh; /* MHz, of all readings */
  unsigned smMax, memory; /* MHz; what the GPU may do, and the memory's */
  unsigned readings;
  char driver[32];
  char missing[160]; /* why there are no readings; empty: there are */
} epClocks;

/* Takes a reading of the GPU at a PCI bus id ("0000:1b:00.0") into `clocks`, zeroed before the first. */
void epClocksRead(const char *busId, epClocks *clocks);

#endif
