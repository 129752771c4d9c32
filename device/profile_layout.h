/* What the kernels of a group that is profiled write, and where. A ring of records in device memory, one an operation, in the
 * order in which operations end. Read by C, by the emulator and by NVRTC.
 *
 * Stamps are the lower 32 bits of the device's clock in nanoseconds, 0 standing for none: operations are shorter than the two
 * seconds in which two of them can be told apart. */
#ifndef EP_DEVICE_PROFILE_LAYOUT_H_
#define EP_DEVICE_PROFILE_LAYOUT_H_

#include "layout.h"

/* What blocks do, each from the first one's begin to the last one's end. */
enum { EP_SPAN_RECORD = 0 /* the routing record is made */, EP_SPAN_SEND, EP_SPAN_RECEIVE, EP_SPANS };
/* What is waited for of other ranks. */
enum { EP_WAIT_COUNTS = 0, EP_WAIT_META, EP_WAIT_PLACES, EP_WAIT_STAGING, EP_WAIT_ROWS, EP_WAITS };

typedef struct epProfileSpan {
  uint32_t first, last;
} epProfileSpan;

/* Waits of one kind for one rank, of all threads that found what they needed missing. */
typedef struct epProfileWait {
  uint32_t count, total /* in EP_WAIT_UNIT ns */, longest, first, last /* stamps: when such a wait ended */;
} epProfileWait;
#define EP_WAIT_UNIT 16u
#define EP_PROFILE_GRAIN 128u /* ns, of stamps and lengths of waits */

typedef struct epProfileRecord {
  uint32_t number; /* the operation's, from 1 on; written last, 0 before */
  uint32_t kind;   /* EP_KERNEL_* */
  uint32_t start;  /* stamp of the first block's begin */
  uint32_t pad;
  uint64_t end; /* the whole clock, when the last block has ended */
  epProfileSpan spans[EP_SPANS];
  /* then epProfileWait waits[EP_WAITS][ranks] */
} epProfileRecord;

/* First in the area; the records follow. */
typedef struct epProfileHeader {
  uint32_t done;    /* blocks of the running operation that have ended */
  uint32_t number;  /* operations that have ended */
  uint32_t records; /* of the ring */
  uint32_t ranks;
  uint32_t recordBytes;
  uint32_t pad[3];
} epProfileHeader;

#define EP_PROFILE_RECORDS 256u
#define EP_PROFILE_BYTES (4u << 20) /* of the ring at most, unless it would hold fewer than EP_PROFILE_LEAST */
#define EP_PROFILE_LEAST 8u

EP_HD epProfileHeader epProfileHeaderOf(uint32_t ranks) {
  epProfileHeader h = {0, 0, EP_PROFILE_RECORDS, ranks, 0, {0, 0, 0}};
  h.recordBytes = (uint32_t)epAlignUp(sizeof(epProfileRecord) + (uint64_t)EP_WAITS * ranks * sizeof(epProfileWait), 16);
  if (EP_PROFILE_BYTES / h.recordBytes < h.records) h.records = EP_PROFILE_BYTES / h.recordBytes;
  if (h.records < EP_PROFILE_LEAST) h.records = EP_PROFILE_LEAST;
  return h;
}
EP_HD uint64_t epProfileBytes(const epProfileHeader *h) { return sizeof *h + (uint64_t)h->records * h->recordBytes; }
/* Byte offset of the record of operation `number`. */
EP_HD uint64_t epProfileRecordAt(const epProfileHeader *h, uint32_t number) {
  return sizeof *h + (uint64_t)(number % h->records) * h->recordBytes;
}

#endif
