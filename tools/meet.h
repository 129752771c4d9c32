/* A meeting on the GPUs themselves: what a rank queues behind it starts within a microsecond of the other ranks. Without it
 * ranks start when each of them sees the host's word, several microseconds apart, and the first one's time has the wait for
 * the last in it. */
#ifndef EP_TOOLS_MEET_H_
#define EP_TOOLS_MEET_H_

#include "fabric.h"

/* Makes what a meeting needs and meets once, so that nothing is loaded while streams are held. Collective. */
int epMeetReady(epPort *port);
/* In stream order, after epMeetReady. Nothing is queued where ranks cannot store into each other's memory (several hosts, the emulated fabric) or
 * the driver does not take the kernel. */
int epMeetQueue(epPort *port);
/* This GPU's clock at the end of the last meeting, which was the same moment on all of them; 0: there was none. Synchronise first. */
int epMeetStamp(epPort *port, unsigned long long *ns);
/* What is queued behind it starts so much later; on the emulated fabric by its clock. */
int epMeetDelay(epPort *port, unsigned microseconds);
void epMeetClose(epPort *port);

#endif
