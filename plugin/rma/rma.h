/* The objects of the provider and the functions between its files. One mutex a communicator guards all of it: public calls
 * (entry.c) take it and enter the GPU, everything here runs inside.
 *
 *   put ──► lane (context, peer): first in, first out ──► GPU copy into the peer's mapped window (neighbours in one), or
 *                                                          frames on the socket that the lane's context maps to
 *   signal ──► a frame behind the puts before it on the same lane and socket ──► the receiver adds and writes
 */
#ifndef EP_RMA_RMA_H_
#define EP_RMA_RMA_H_

#include <pthread.h>
#include <stdatomic.h>

#include "abi.h"
#include "gpu.h"
#include "log.h"
#include "secret.h"
#include "settings.h"

enum {
  EP_RMA_CHUNK = 512 << 10, /* bytes of a frame at most: what one staging slot holds */
  EP_RMA_SLOTS = 16,        /* staging slots of a communicator and direction */
  EP_RMA_RING = 64,         /* frames queued on a socket */
  EP_RMA_MAX_RECVS = 8,     /* times 32: operations in flight for a context and peer */
  EP_RMA_DEPTH = EP_RMA_MAX_RECVS * EP_RMA_REQUESTS_PER_RECV,
  EP_RMA_MAX_CONTEXTS = 4096
};

typedef struct epRmaColl epRmaColl;
typedef struct epRmaContext epRmaContext;
typedef struct epRmaLane epRmaLane;

/* ---- on the wire ---------------------------------------------------------------------------------------------- */
enum {
  EP_RMA_FRAME_DATA = 0x52500001,
  EP_RMA_FRAME_SIGNAL,
  EP_RMA_FRAME_WINDOW,
  EP_RMA_FRAME_BYE,
  EP_RMA_FRAME_BYE_SEEN
};
typedef struct {
  uint32_t type;
  uint32_t window;
  uint64_t offset; /* DATA, SIGNAL: in the receiver's window; WINDOW: of the window in its exported allocation */
  uint64_t size;   /* DATA: bytes that follow; WINDOW: bytes of the sender's window, 0 where it could not register */
  uint64_t value;  /* SIGNAL: what to add; WINDOW: bytes of the exported allocation, 0 where a descriptor is not sent */
} epRmaHeader;

/* ---- operations ----------------------------------------------------------------------------------------------- */
typedef struct epRmaWindow {
  epRmaColl *coll;
  uint32_t id;
  char *base; /* NULL until this rank registers it */
  size_t size;
  int type;
  bool neverReset;
  uint64_t *shadow; /* GPU memory that only signals change: the values it has */
  unsigned seen;    /* peers that registered theirs */
  unsigned uses;    /* operations that read or will read it */
  int fd;           /* ours, exported */
  uint64_t offset, allocation;
  struct epRmaPeerWindow {
    bool known;
    uint64_t size, offset, allocation;
    int fd;
    char *mapped; /* the peer's allocation here, or NULL */
  } peers[];
} epRmaWindow;

typedef struct epRmaOp {
  struct epRmaOp *next;    /* in its lane, or among the free ones */
  struct epRmaOp *created; /* all of a context */
  epRmaLane *lane;
  epRmaWindow *from, *to, *signal;
  uint64_t fromOffset, toOffset, size, claimed;
  uint64_t signalOffset, signalValue;
  unsigned frames; /* queued, not yet written */
  char *direct;    /* where a copy of this GPU or CPU puts it; NULL: frames do */
  uint64_t number; /* of the submission that copies it (gpu.h); 0: none yet */
  bool copied, queued, done;
} epRmaOp;

/* Operations of one context for one peer, in order. */
struct epRmaLane {
  epRmaContext *context;
  uint32_t rank;
  unsigned inFlight;
  epRmaOp *head, *tail;
  epRmaOp *fresh;  /* the first whose copy was not asked for */
  epRmaLane *next; /* lanes that have something to do */
  bool active;
};

struct epRmaContext {
  epRmaColl *coll; /* stays the first: see queryLastError */
  epRmaContext *next;
  int count;
  int first; /* number of its first context in the communicator */
  epRmaOp *created, *free;
  epRmaLane lanes[]; /* count x ranks */
};

/* ---- sockets -------------------------------------------------------------------------------------------------- */
typedef struct {
  epRmaHeader header;
  const char *payload;
  int slot; /* of what leaves, or -1 */
  int fd;   /* sent along and closed, or -1 */
  epRmaOp *op;
} epRmaFrame;

/* Pinned memory between GPU and sockets, allocated before any kernel runs: to allocate may mean to wait for kernels, and
 * these wait for us. A slot is held for a frame that was begun, so it always comes free again. */
typedef struct {
  char *memory; /* EP_RMA_SLOTS chunks */
  void *events[EP_RMA_SLOTS];
  bool busy[EP_RMA_SLOTS];
  bool ending[EP_RMA_SLOTS]; /* free as soon as the event is done */
} epRmaStage;

typedef struct epRmaSocket {
  epRmaColl *coll;
  struct epRmaSocket *next; /* sockets with frames queued */
  uint32_t rank;
  int fd;           /* -1: closed */
  bool sending;     /* it is in that list */
  bool byeSeen;     /* the peer closes its communicator */
  bool byeOwed;     /* and is to be told that we read all it sent */
  bool byeAnswered; /* the peer read all that we sent */
  /* sending */
  epRmaFrame ring[EP_RMA_RING];
  unsigned head, tail; /* counts; slots are modulo EP_RMA_RING */
  size_t sent;         /* bytes of the first frame */
  uint64_t movedAt;    /* ms */
  /* receiving */
  epRmaHeader in;
  size_t got; /* bytes of the frame so far, header included */
  int inFd;
  int inSlot;
  char ahead[2048]; /* read in one go, not yet looked at: bytes aheadAt to aheadEnd */
  size_t aheadAt, aheadEnd;
  bool held; /* they wait for a slot or for other sockets' turns */
} epRmaSocket;

typedef struct {
  int count;     /* sockets; 0 for this rank itself */
  bool local;    /* they are UNIX sockets */
  char name[64]; /* for messages: where it listened */
  epRmaSocket sockets[];
} epRmaPeer;

/* What a communicator did, told in the log when it is closed. A turn of NCCL's progress thread is busy when it began with
 * operations in flight. */
typedef struct {
  uint64_t puts, copies, signals, writes; /* writes: calls for signals */
  uint64_t turns, turnUs, workUs;         /* busy ones, their time, and of it that in this provider's progress */
} epRmaTally;

struct epRmaColl {
  pthread_mutex_t mutex;
  atomic_int wanted; /* callers other than the progress thread that wait for it */
  uint32_t ranks, rank;
  epRmaSettings settings;
  epRmaPeer **peers;
  int epoll;
  epRmaGpu gpu;
  epRmaStage leaving, arriving;
  epRmaWindow **windows; /* by number; the dead window where one was deregistered */
  uint32_t windowRoom, nextWindow;
  epRmaContext *contexts;
  int contextCount;
  epRmaLane *activeHead, *activeTail;
  epRmaSocket *sending;
  unsigned held;                    /* sockets */
  epRmaGpuWord words[EP_RMA_WORDS]; /* signals that came in this turn */
  int wordCount;
  uint64_t progressedAt; /* us */
  bool busy;             /* operations were in flight at the end of the last turn */
  uint64_t drivenAt;     /* us: when NCCL last called progress, which some of its callers never do */
  epRmaTally tally;
  epRmaResult error;
};

uint64_t epRmaMilliseconds(void);
uint64_t epRmaMicroseconds(void);

/* ---- handle.c: listening ----------------------------------------------------------------------------------------- */
typedef struct epRmaListener epRmaListener;
epRmaResult epRmaListen(void *handle, epRmaListener **out);
void epRmaCloseListener(epRmaListener *listener);
const epRmaSettings *epRmaListenerSettings(const epRmaListener *listener);

/* ---- handshake.c: sockets with peers that hold the secret --------------------------------------------------------- */
epRmaResult epRmaConnectPeers(epRmaColl *coll, epRmaListener *listener, void *handles[]);

/* ---- coll.c: the communicator -------------------------------------------------------------------------------- */
epRmaResult epRmaCollOpen(epRmaListener *listener, void *handles[], uint32_t ranks, uint32_t rank, epRmaColl **out);
epRmaResult epRmaCollClose(epRmaColl *coll);
/* Notes the first error, with a line in the log; everything fails with it from then on. */
epRmaResult epRmaFail(epRmaColl *coll, epRmaResult error, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
epRmaResult epRmaNote(epRmaColl *coll, epRmaResult error); /* the same for an error that is already in the log */
epRmaResult epRmaProgress(epRmaColl *coll);
bool epRmaIdle(epRmaColl *coll); /* nothing to do, and nothing came: outside the GPU */
/* Lets others in and the CPU breathe between two looks. */
void epRmaPause(epRmaColl *coll);

/* ---- socket.c: frames ------------------------------------------------------------------------------------------ */
epRmaSocket *epRmaSocketOf(epRmaColl *coll, uint32_t rank, int context);
bool epRmaSocketRoom(const epRmaSocket *socket);
void epRmaSocketPush(epRmaSocket *socket, const epRmaFrame *frame); /* there is room */
epRmaResult epRmaSocketSend(epRmaSocket *from);
epRmaResult epRmaSocketReceive(epRmaSocket *to);
void epRmaSocketClose(epRmaSocket *socket); /* inside */

/* ---- stage.c ---------------------------------------------------------------------------------------------------- */
epRmaResult epRmaStageMake(epRmaStage *stage);
void epRmaStageFree(epRmaStage *stage);
epRmaResult epRmaStageTake(epRmaStage *stage, int *slot); /* -1: none is free, try again later */
bool epRmaStageEnding(const epRmaStage *stage);           /* some copy may not be done */
char *epRmaStageAt(const epRmaStage *stage, int slot);

/* ---- window.c -------------------------------------------------------------------------------------------------- */
epRmaResult epRmaWindowRegister(epRmaColl *coll, void *data, size_t size, int type, uint64_t flags, epRmaWindow **out);
epRmaResult epRmaWindowDeregister(epRmaWindow *window);
epRmaResult epRmaWindowSeen(epRmaColl *coll, uint32_t rank, const epRmaHeader *header, int fd);
/* The window that a peer names; NULL with no error for one that is gone. */
epRmaResult epRmaWindowFind(epRmaColl *coll, uint32_t rank, const epRmaHeader *header, uint64_t bytes,
                            epRmaWindow **out);
void epRmaWindowFreeAll(epRmaColl *coll);

/* ---- signal.c -------------------------------------------------------------------------------------------------- */
epRmaResult epRmaSignalApply(epRmaColl *coll, epRmaWindow *window, uint64_t offset, uint64_t value);
epRmaResult epRmaSignalsWrite(epRmaColl *coll);

/* ---- lane.c: operations ---------------------------------------------------------------------------------------- */
epRmaResult epRmaContextCreate(epRmaColl *coll, int count, epRmaContext **out);
epRmaResult epRmaContextDestroy(epRmaContext *context);
typedef struct {
  epRmaWindow *from, *to, *signal;
  uint64_t fromOffset, toOffset, size, signalOffset, signalValue;
  uint32_t rank;
  int context;
} epRmaPut;
epRmaResult epRmaPutIssue(epRmaContext *context, const epRmaPut *put, epRmaOp **out);
epRmaResult epRmaLanesPump(epRmaColl *coll);
bool epRmaOpLooksDone(const epRmaOp *op);         /* without the mutex: done, or about to be told */
epRmaResult epRmaOpTest(epRmaOp *op, bool *done); /* done: the operation is gone */
void epRmaOpFrameSent(epRmaOp *op);
void epRmaOpsForget(const epRmaWindow *window); /* a window that goes away under them */

#endif
