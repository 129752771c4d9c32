/* A loop is cut into as many parts as there are threads, of rows enough to be worth one. */
#include "spread.h"

#include <pthread.h>
#include <unistd.h>

enum { LEAST_ROWS = 32 };

static unsigned most = 1;

typedef struct share {
  epSpreadFn fn;
  void *context;
  unsigned part;
  uint64_t first, end;
  pthread_t thread;
  int started;
} share;

void epSpreadShare(unsigned ranks) {
  long each = sysconf(_SC_NPROCESSORS_ONLN) / (long)ranks - 2; /* a driver's thread, and NCCL's proxy */
  most = each < 1 ? 1 : each > EP_SPREAD_MOST ? EP_SPREAD_MOST : (unsigned)each;
}

static void *work(void *of) {
  const share *s = of;
  s->fn(s->context, s->part, s->first, s->end);
  return NULL;
}

unsigned epSpread(uint64_t count, epSpreadFn fn, void *context) {
  share shares[EP_SPREAD_MOST];
  uint64_t wanted = count / LEAST_ROWS;
  unsigned parts = wanted < 1 ? 1 : wanted > most ? most : (unsigned)wanted;
  for (unsigned p = 0; p < parts; p++) {
    shares[p] = (share){fn, context, p, count * p / parts, count * (p + 1) / parts, 0, 0};
    shares[p].started = p > 0 && pthread_create(&shares[p].thread, NULL, work, &shares[p]) == 0;
  }
  for (unsigned p = 0; p < parts; p++)
    if (!shares[p].started) work(&shares[p]);
  for (unsigned p = 0; p < parts; p++)
    if (shares[p].started) pthread_join(shares[p].thread, NULL);
  return parts;
}
