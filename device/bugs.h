/* Faults that can be planted in the kernels, one at a time, to prove that the emulated fabric finds them. epConfig.bug
 * selects one; GPUs always compile with 0, and the test's branches fold away. Names are what `ep_bench --bug` takes. */
#ifndef EP_DEVICE_BUGS_H_
#define EP_DEVICE_BUGS_H_

#define EP_BUGS(X)                                                                                               \
  X(NONE, "none")                                                                                                \
  X(FLAG_RELAXED, "flag-relaxed")           /* arrival flag stored without release: signal before data */        \
  X(NO_PROXY_FENCE_STORE, "no-fence-store") /* generic -> async fence missing before a bulk store reads smem */  \
  X(NO_PROXY_FENCE_LOAD, "no-fence-load")   /* acquire -> async fence missing before a bulk load of peer rows */ \
  X(STAGE_REUSE, "stage-reuse")             /* smem row refilled while a bulk store may still read it */         \
  X(WAIT_READ_ONLY, "wait-read")            /* .read instead of full wait before the flag's release */           \
  X(SIGNAL_FIRST, "signal-first")           /* flag raised before the rows are sent */                           \
  X(SLOT_OFF_BY_ONE, "slot-off-by-one")     /* a row lands one slot too far */                                   \
  X(SKIP_WAIT, "skip-wait")                 /* rows read without waiting for their flag */                       \
  X(NO_CREDIT, "no-credit")                 /* staging reused without the reader's credit */                     \
  X(NO_GRID_BARRIER, "no-grid-barrier")     /* histogram of other blocks read without waiting */                 \
  X(WAIT_UNSCHEDULED, "wait-unscheduled")   /* a sender waits for an epilogue block of its own kernel */         \
  X(GIN_SIGNAL_FIRST, "gin-signal-first")   /* a tail is told before its rows are put */                         \
  X(GIN_WEAK, "gin-weak")                   /* a tail is a weak signal, which waits for no puts */               \
  X(GIN_WRONG_TAIL, "gin-wrong-tail")       /* a tail says one batch too many */                                 \
  X(NO_FORWARD_FENCE, "no-forward-fence")   /* a forwarder tells its domain of rows without releasing them */    \
  X(GIN_SLOT_EARLY, "gin-slot-early")       /* rows put one generation before the rail's credit */               \
  X(GIN_NO_FLUSH, "gin-no-flush")           /* an operation ends before the network has read what it put from */

enum epBug {
#define X(id, name) EP_BUG_##id,
  EP_BUGS(X)
#undef X
      EP_BUG_COUNT
};

#endif
