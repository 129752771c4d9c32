/* From NCCL's handles to connected sockets. A handle holds a secret of its listener's, and NCCL's bootstrap takes it to every
 * rank and to nobody else. The higher rank connects to the lower, and both prove that they hold the
 * listener's secret before anything else is read:
 *
 *   connector ── hello: who, to whom, which socket, nonce ──────► listener
 *             ◄── nonce, hash(secret, "L" hello nonce) ──────────
 *             ─── hash(secret, "C" hello nonce) ────────────────►
 *
 * All connections are made at once in one poll loop, so no order of ranks can deadlock and a stranger delays nobody. */
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "handle.h"

#define HELLO_MAGIC 0x316f6c6c65687065ull
static const char CLOSED[] = "it closed the connection, or did not accept our proof";
enum { STRANGER_MS = 10000 }; /* for a proof, once a connection is there */

typedef struct {
  uint64_t magic;
  uint32_t from, to, socket, ranks;
  uint8_t nonce[EP_RMA_SECRET_BYTES];
} helloText;

typedef struct {
  uint8_t nonce[EP_RMA_SECRET_BYTES];
  uint8_t proof[EP_RMA_SECRET_BYTES];
} answerText;

/* A connection that has proved nothing yet. */
typedef struct {
  int fd;
  bool listener; /* ours is the listening end */
  enum { CONNECTING, WAIT_HELLO, WAIT_ANSWER, WAIT_PROOF } stage;
  uint32_t rank, socket;
  const char *why; /* it is dropped */
  uint64_t deadline;
  size_t got;
  helloText hello;
  answerText answer;
  uint8_t proof[EP_RMA_SECRET_BYTES];
} candidate;

typedef struct {
  epRmaColl *coll;
  epRmaListener *own;
  epRmaHandle *handles; /* by rank */
  candidate *candidates;
  unsigned count, room;
  unsigned missing; /* sockets not yet connected */
} meeting;

/* ---- proving --------------------------------------------------------------------------------------------------- */

static void prove(const uint8_t *secret, char side, const helloText *hello, const uint8_t *nonce, uint8_t *proof) {
  struct {
    char side[8];
    helloText hello;
    uint8_t nonce[EP_RMA_SECRET_BYTES];
  } message = {{side}, *hello, {0}};
  memcpy(message.nonce, nonce, sizeof(message.nonce));
  epRmaKeyedHash(secret, &message, sizeof(message), proof);
}

static bool sendAll(int fd, const void *bytes, size_t count) {
  /* Nothing was sent before on this socket: its buffer takes so few bytes at once. */
  return send(fd, bytes, count, MSG_NOSIGNAL) == (ssize_t)count;
}

/* 1: all is there; 0: not yet; -1: the connection is over. Never reads past what was asked for. */
static int receiveAll(candidate *at, void *bytes, size_t count) {
  ssize_t got = recv(at->fd, (char *)bytes + at->got, count - at->got, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (got <= 0) return -1;
  at->got += (size_t)got;
  if (at->got < count) return 0;
  at->got = 0;
  return 1;
}

static void drop(meeting *all, unsigned at) {
  close(all->candidates[at].fd);
  all->candidates[at] = all->candidates[--all->count];
}

static void settle(meeting *all, unsigned at) {
  candidate *from = &all->candidates[at];
  epRmaPeer *peer = all->coll->peers[from->rank];
  int one = 1, idle = 2, interval = 1, timeout = all->coll->settings.timeoutMs, room = 4 << 20;
  bool set;
  if (peer->local) /* UNIX sockets do not grow their buffers by themselves */
    set = setsockopt(from->fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)) == 0;
  else /* a peer's host that falls silent is found out by probes, whether data waits or not */
    set = setsockopt(from->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) == 0 &&
          setsockopt(from->fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one)) == 0 &&
          setsockopt(from->fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle)) == 0 &&
          setsockopt(from->fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval)) == 0 &&
          setsockopt(from->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof(timeout)) == 0;
  if (!set) EP_RMA_INFO("options of the socket with rank %u: %s", from->rank, strerror(errno));
  peer->sockets[from->socket].fd = from->fd;
  all->missing--;
  all->candidates[at] = all->candidates[--all->count];
}

/* One step of a candidate. -1: drop it; 1: it became a socket; 0: it waits. */
static int step(meeting *all, candidate *at) {
  epRmaColl *coll = all->coll;
  const epRmaHandle *own = &all->own->handle;
  uint8_t expected[EP_RMA_SECRET_BYTES];
  int error = 0, got;
  socklen_t bytes = sizeof(error);
  switch (at->stage) {
  case CONNECTING:
    if (getsockopt(at->fd, SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) error = errno;
    at->why = strerrordesc_np(error);
    if (error) return -1;
    at->why = CLOSED;
    at->hello = (helloText){HELLO_MAGIC, coll->rank, at->rank, at->socket, coll->ranks, {0}};
    if (!epRmaRandom(at->hello.nonce, sizeof(at->hello.nonce)) || !sendAll(at->fd, &at->hello, sizeof(at->hello)))
      return -1;
    at->stage = WAIT_ANSWER;
    return 0;
  case WAIT_HELLO:
    got = receiveAll(at, &at->hello, sizeof(at->hello));
    if (got <= 0) return got;
    at->rank = at->hello.from, at->socket = at->hello.socket;
    if (at->hello.magic != HELLO_MAGIC || at->hello.to != coll->rank || at->hello.ranks != coll->ranks ||
        at->rank <= coll->rank || at->rank >= coll->ranks || at->socket >= (uint32_t)coll->peers[at->rank]->count ||
        coll->peers[at->rank]->sockets[at->socket].fd >= 0)
      return -1;
    if (!epRmaRandom(at->answer.nonce, sizeof(at->answer.nonce))) return -1;
    prove(own->secret, 'L', &at->hello, at->answer.nonce, at->answer.proof);
    if (!sendAll(at->fd, &at->answer, sizeof(at->answer))) return -1;
    at->stage = WAIT_PROOF;
    return 0;
  case WAIT_ANSWER:
    got = receiveAll(at, &at->answer, sizeof(at->answer));
    if (got <= 0) return got;
    prove(all->handles[at->rank].secret, 'L', &at->hello, at->answer.nonce, expected);
    if (!epRmaSameSecret(expected, at->answer.proof)) {
      at->why = "it does not hold the secret that its handle names";
      return -1;
    }
    prove(all->handles[at->rank].secret, 'C', &at->hello, at->answer.nonce, at->proof);
    return sendAll(at->fd, at->proof, sizeof(at->proof)) ? 1 : -1;
  case WAIT_PROOF:
    got = receiveAll(at, at->proof, sizeof(at->proof));
    if (got <= 0) return got;
    prove(own->secret, 'C', &at->hello, at->answer.nonce, expected);
    /* Another connection may have taken the place meanwhile. */
    return epRmaSameSecret(expected, at->proof) && coll->peers[at->rank]->sockets[at->socket].fd < 0 ? 1 : -1;
  }
  return -1;
}

static candidate *add(meeting *all, int fd) {
  if (all->count == all->room) {
    unsigned room = all->room ? 2 * all->room : 64;
    candidate *more = realloc(all->candidates, room * sizeof(*more));
    if (!more) return NULL;
    all->candidates = more, all->room = room;
  }
  candidate *at = &all->candidates[all->count++];
  memset(at, 0, sizeof(*at));
  at->fd = fd;
  at->deadline = epRmaMilliseconds() + (uint64_t)all->coll->settings.timeoutMs;
  return at;
}

static epRmaResult dial(meeting *all, uint32_t rank, uint32_t index) {
  const epRmaHandle *to = &all->handles[rank];
  epRmaPeer *peer = all->coll->peers[rank];
  const epRmaSettings *settings = &all->coll->settings;
  struct sockaddr_storage address, from = {0};
  struct sockaddr_un local;
  /* Interface i of the one with interface i of the other, as far as both have them. */
  unsigned own = (unsigned)settings->interfaceCount, pairs = own < to->addresses ? own : to->addresses;
  epRmaHandleAddress(to, index % pairs, &address);
  int fd = socket(peer->local ? AF_UNIX : address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), error;
  if (fd < 0) goto fail;
  if (peer->local) {
    error = connect(fd, (struct sockaddr *)&local, epRmaUnixName(to->name, &local));
  } else {
    /* From a named interface, whatever the routes say. */
    from = settings->interfaces[index % pairs].address;
    for (unsigned i = 0; i < own && from.ss_family != address.ss_family; i++) from = settings->interfaces[i].address;
    if (from.ss_family != address.ss_family) errno = EAFNOSUPPORT;
    if (from.ss_family != address.ss_family || bind(fd, (struct sockaddr *)&from, epRmaAddressBytes(&from)) != 0)
      goto fail;
    error = connect(fd, (struct sockaddr *)&address, epRmaAddressBytes(&address));
  }
  if (error != 0 && errno == EAGAIN) { /* a UNIX listener's queue is full: it will be emptied */
    close(fd);
    return EP_RMA_OK;
  }
  if (error != 0 && errno != EINPROGRESS) goto fail;
  candidate *at = add(all, fd);
  if (!at) goto fail;
  at->stage = CONNECTING, at->rank = rank, at->socket = index;
  return EP_RMA_OK;
fail:
  EP_RMA_WARN("rank %u (%s) cannot be reached: %s", rank, peer->name, strerror(errno));
  if (fd >= 0) close(fd);
  return EP_RMA_REMOTE_ERROR;
}

static void acceptAll(meeting *all, int listener) {
  while (listener >= 0) {
    /* Strangers may fill a part of the table, never all of the memory. */
    if (all->count > all->missing + 256) return;
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    candidate *at = add(all, fd);
    if (!at) {
      close(fd);
      return;
    }
    at->stage = WAIT_HELLO, at->listener = true;
    if (all->coll->settings.timeoutMs > STRANGER_MS) at->deadline = epRmaMilliseconds() + STRANGER_MS;
  }
}

/* Who has not come, for the error line. */
static epRmaResult report(meeting *all) {
  for (uint32_t rank = 0; rank < all->coll->ranks; rank++)
    for (int i = 0; i < all->coll->peers[rank]->count; i++)
      if (all->coll->peers[rank]->sockets[i].fd < 0) {
        EP_RMA_WARN(
            "rank %u (%s) did not connect to rank %u within %d ms (NCCL_EP_RMA_TIMEOUT_MS); %u sockets are missing",
            rank, all->coll->peers[rank]->name, all->coll->rank, all->coll->settings.timeoutMs, all->missing);
        return EP_RMA_REMOTE_ERROR;
      }
  return EP_RMA_INTERNAL_ERROR;
}

static bool dialed(const meeting *all, uint32_t rank, uint32_t index) {
  if (all->coll->peers[rank]->sockets[index].fd >= 0) return true;
  for (unsigned i = 0; i < all->count; i++)
    if (!all->candidates[i].listener && all->candidates[i].rank == rank && all->candidates[i].socket == index)
      return true;
  return false;
}

/* *again: a listener's queue was full, try once more. */
static epRmaResult dialAll(meeting *all, bool *again) {
  epRmaResult rc = EP_RMA_OK;
  *again = false;
  for (uint32_t rank = 0; !rc && rank < all->coll->rank; rank++)
    for (uint32_t i = 0; !rc && i < (uint32_t)all->coll->peers[rank]->count; i++) {
      if (dialed(all, rank, i)) continue;
      unsigned before = all->count;
      rc = dial(all, rank, i);
      *again = *again || all->count == before;
    }
  return rc;
}

static epRmaResult meet(meeting *all) {
  epRmaColl *coll = all->coll;
  epRmaResult rc = EP_RMA_OK;
  uint64_t deadline = epRmaMilliseconds() + (uint64_t)coll->settings.timeoutMs;
  struct pollfd *polls = NULL;
  unsigned room = 0;
  bool again = true;
  while (!rc && all->missing > 0) {
    uint64_t now = epRmaMilliseconds();
    if (now >= deadline) {
      rc = report(all);
      break;
    }
    if (again) rc = dialAll(all, &again);
    if (rc) break;
    if (!polls || room < all->count) {
      room = 2 * all->count + 64;
      free(polls);
      polls = calloc(room + EP_RMA_MAX_INTERFACES + 1, sizeof(*polls));
      if (!polls) {
        EP_RMA_WARN("no memory to connect %u ranks", coll->ranks);
        rc = EP_RMA_SYSTEM_ERROR;
        break;
      }
    }
    unsigned waiting = all->count;
    for (unsigned i = 0; i < waiting; i++)
      polls[i] = (struct pollfd){all->candidates[i].fd, all->candidates[i].stage == CONNECTING ? POLLOUT : POLLIN, 0};
    for (unsigned i = 0; i <= EP_RMA_MAX_INTERFACES; i++)
      polls[waiting + i] = (struct pollfd){all->own->fds[i], POLLIN, 0}; /* poll leaves out -1 */
    if (poll(polls, waiting + EP_RMA_MAX_INTERFACES + 1, again ? 1 : 50) < 0 && errno != EINTR) {
      EP_RMA_WARN("poll: %s", strerror(errno));
      rc = EP_RMA_SYSTEM_ERROR;
      break;
    }
    now = epRmaMilliseconds();
    for (unsigned i = waiting; i-- > 0;) { /* from the end: a dropped one is replaced by one that was looked at */
      candidate *at = &all->candidates[i];
      int moved = polls[i].revents ? step(all, at) : 0;
      if (moved == 0 && now >= at->deadline) moved = -1;
      if (moved > 0) {
        settle(all, i);
      } else if (moved < 0 && at->listener) {
        EP_RMA_WARN("refused a connection that did not prove this communicator's secret");
        drop(all, i);
      } else if (moved < 0) {
        EP_RMA_WARN("no connection with rank %u (%s): %s", at->rank, coll->peers[at->rank]->name,
                    at->why ? at->why : "it does not answer");
        rc = EP_RMA_REMOTE_ERROR;
        break;
      }
    }
    for (int i = 0; i <= EP_RMA_MAX_INTERFACES; i++)
      if (polls[waiting + (unsigned)i].revents) acceptAll(all, all->own->fds[i]);
  }
  free(polls);
  return rc;
}

/* Room for as many descriptors as the sockets need, as far as the hard limit lets us. */
static epRmaResult raiseLimit(unsigned sockets) {
  struct rlimit limit;
  rlim_t need = (rlim_t)sockets * 2 + 256;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= need)
    return EP_RMA_OK;
  if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < sockets + 64) {
    EP_RMA_WARN("%u sockets are needed, the hard limit of open files is %llu: raise it, or lower NCCL_EP_RMA_SOCKETS",
                sockets, (unsigned long long)limit.rlim_max);
    return EP_RMA_SYSTEM_ERROR;
  }
  limit.rlim_cur = limit.rlim_max == RLIM_INFINITY || limit.rlim_max > need ? need : limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) EP_RMA_INFO("the limit of open files stays: %s", strerror(errno));
  return EP_RMA_OK;
}

static epRmaResult readHandles(meeting *all, void *handles[]) {
  const epRmaHandle *own = &all->own->handle;
  for (uint32_t rank = 0; rank < all->coll->ranks; rank++) {
    epRmaHandle *text = &all->handles[rank];
    if (handles[rank]) memcpy(text, handles[rank], sizeof(*text));
    if (text->magic != EP_RMA_HANDLE_MAGIC || text->addresses < 1 || text->addresses > EP_RMA_MAX_INTERFACES ||
        text->sockets < 1 || text->sockets > EP_RMA_MAX_SOCKETS) {
      EP_RMA_WARN("the handle of rank %u is not of this version of the plugin: all ranks need the same one", rank);
      return EP_RMA_INVALID_ARGUMENT;
    }
    if (rank == all->coll->rank && (text->name != own->name || !epRmaSameSecret(text->secret, own->secret))) {
      EP_RMA_WARN("the handle of rank %u is not that of the listener", rank);
      return EP_RMA_INVALID_ARGUMENT;
    }
  }
  return EP_RMA_OK;
}

static epRmaResult makePeers(meeting *all) {
  epRmaColl *coll = all->coll;
  const epRmaHandle *own = &all->own->handle;
  for (uint32_t rank = 0; rank < coll->ranks; rank++) {
    const epRmaHandle *text = &all->handles[rank];
    int count = rank == coll->rank ? 0 : text->sockets < own->sockets ? text->sockets : own->sockets;
    epRmaPeer *peer = coll->peers[rank] = calloc(1, sizeof(*peer) + (size_t)count * sizeof(epRmaSocket));
    if (!peer) {
      EP_RMA_WARN("no memory to connect %u ranks", coll->ranks);
      return EP_RMA_SYSTEM_ERROR;
    }
    peer->count = count;
    peer->local = own->host != 0 && own->host == text->host;
    epRmaHandleName(text, peer->local, peer->name, sizeof(peer->name));
    for (int i = 0; i < count; i++) {
      epRmaSocket *to = &peer->sockets[i];
      to->coll = coll, to->rank = rank, to->fd = to->inFd = to->inSlot = -1;
    }
    all->missing += (unsigned)count;
  }
  return EP_RMA_OK;
}

epRmaResult epRmaConnectPeers(epRmaColl *coll, epRmaListener *listener, void *handles[]) {
  meeting all = {.coll = coll, .own = listener, .handles = calloc(coll->ranks, sizeof(epRmaHandle))};
  if (!all.handles) {
    EP_RMA_WARN("no memory to connect %u ranks", coll->ranks);
    return EP_RMA_SYSTEM_ERROR;
  }
  epRmaResult rc = readHandles(&all, handles);
  if (!rc) rc = makePeers(&all);
  if (!rc) rc = raiseLimit(all.missing);
  if (!rc) rc = meet(&all);
  for (unsigned i = 0; i < all.count; i++) close(all.candidates[i].fd);
  free(all.candidates);
  free(all.handles);
  return rc;
}
