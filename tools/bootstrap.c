/* The star of connections between the processes of a run. Every wait is bounded, so that a rank that never starts, or
 * dies, ends the others with a line that says whom they waited for. */
#include "bootstrap.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "failure.h"

#define CONNECT_SECONDS 120
#define REPLY_SECONDS 600
#define HELLO 0x45504e31u

struct epNet {
  int rank, ranks;
  int *sockets; /* rank 0: [ranks], own entry -1; others: one, to rank 0 */
};

typedef struct hello {
  uint32_t magic, rank, ranks;
} hello;

static int readNumber(const char *name, int *value) {
  const char *text = getenv(name);
  char *end;
  long number;
  if (!text || !*text) return 0;
  number = strtol(text, &end, 10);
  if (*end || number < 0 || number > 1 << 20) return epToolFail("%s=%s: expected a number", name, text);
  *value = (int)number;
  return 1;
}

int epNetPlaceFromEnvironment(epNetPlace *place) {
  static const char *const names[2][3] = {
      {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}};
  for (int i = 0; i < 2; i++) {
    int rank = readNumber(names[i][0], &place->rank), ranks = readNumber(names[i][1], &place->ranks);
    int local = readNumber(names[i][2], &place->localRank);
    if (rank < 0 || ranks < 0 || local < 0) return -1;
    if (!rank || !ranks) continue;
    if (place->ranks < 1 || place->rank >= place->ranks)
      return epToolFail("%s=%d, %s=%d: expected a rank below the size", names[i][0], place->rank, names[i][1],
                        place->ranks);
    if (!local) place->localRank = place->rank;
    return place->ranks > 1;
  }
  return 0;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int sendAll(int socket, const void *data, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    ssize_t n = send(socket, (const char *)data + at, bytes - at, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return -1;
    at += (size_t)n;
  }
  return 0;
}

static int receiveAll(int socket, void *data, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    ssize_t n = recv(socket, (char *)data + at, bytes - at, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return -1;
    at += (size_t)n;
  }
  return 0;
}

static void tune(int socket) {
  int one = 1;
  struct timeval limit = {REPLY_SECONDS, 0};
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

/* ---- Where rank 0 is -------------------------------------------------------------------------------------------- */

typedef struct meeting {
  char file[512]; /* empty: fixed address */
  char host[256];
  int port;
} meeting;

static int findMeeting(const epNetPlace *place, meeting *m) {
  const char *file = getenv("NCCL_EP_BENCH_ID_FILE"), *host = getenv("MASTER_ADDR"), *job = getenv("PMIX_NAMESPACE");
  int port = 0, own = readNumber("NCCL_EP_BENCH_PORT", &m->port), master = readNumber("MASTER_PORT", &port), local = 0;
  *m->file = 0;
  if (own < 0 || master < 0) return -1;
  if (file && *file) {
    snprintf(m->file, sizeof(m->file), "%s", file);
    return 0;
  }
  if (host && *host && (own || master)) {
    snprintf(m->host, sizeof(m->host), "%s", host);
    if (!own) m->port = port + 1;
    return 0;
  }
  /* OpenMPI on one host names its job */
  if (job && *job && readNumber("OMPI_COMM_WORLD_LOCAL_SIZE", &local) > 0 && local == place->ranks) {
    snprintf(m->file, sizeof(m->file), "/tmp/nccl_ep_bench.%u.", (unsigned)getuid());
    for (size_t at = strlen(m->file); *job && at + 1 < sizeof(m->file); job++, at++) {
      m->file[at] = *job == '/' ? '_' : *job;
      m->file[at + 1] = 0;
    }
    return 0;
  }
  return epToolFail(
      "%d processes, but no way to find rank 0: set NCCL_EP_BENCH_ID_FILE to a path that all ranks see, or "
      "MASTER_ADDR and MASTER_PORT",
      place->ranks);
}

/* Written under another name first, so that nobody reads half an address. */
static int announce(const meeting *m, int listener) {
  char temporary[sizeof(m->file) + 8], host[256];
  struct sockaddr_in address = {0};
  socklen_t length = sizeof(address);
  FILE *file;
  int bad;
  if (getsockname(listener, (struct sockaddr *)&address, &length) || gethostname(host, sizeof(host)))
    return epToolFail("rank 0: cannot tell its own address: %s", strerror(errno));
  snprintf(temporary, sizeof(temporary), "%s.new", m->file);
  file = fopen(temporary, "w");
  if (!file) return epToolFail("rank 0: %s: %s", temporary, strerror(errno));
  bad = fprintf(file, "%s %d\n", host, ntohs(address.sin_port)) < 0;
  bad |= fclose(file) != 0;
  if (bad || rename(temporary, m->file)) return epToolFail("rank 0: %s: %s", m->file, strerror(errno));
  return 0;
}

static int readAnnouncement(meeting *m) {
  FILE *file = fopen(m->file, "r");
  int fields;
  if (!file) return -1;
  fields = fscanf(file, "%255s %d", m->host, &m->port);
  fclose(file);
  return fields == 2 ? 0 : -1;
}

static int dial(const char *host, int port) {
  struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found = NULL;
  char service[16];
  int fd = -1;
  snprintf(service, sizeof(service), "%d", port);
  if (getaddrinfo(host, service, &hints, &found)) return -1;
  for (struct addrinfo *a = found; a && fd < 0; a = a->ai_next) {
    fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen)) {
      close(fd);
      fd = -1;
    }
  }
  freeaddrinfo(found);
  return fd;
}

/* ---- Connecting ------------------------------------------------------------------------------------------------- */

static int serve(epNet *net, const meeting *m) {
  struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(*m->file ? 0 : m->port))};
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1, rc = -1;
  double deadline = now() + CONNECT_SECONDS;
  if (listener < 0) return epToolFail("rank 0: socket: %s", strerror(errno));
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (bind(listener, (struct sockaddr *)&any, sizeof(any)) || listen(listener, net->ranks)) {
    epToolFail("rank 0: port %d: %s (NCCL_EP_BENCH_PORT chooses another)", m->port, strerror(errno));
    goto done;
  }
  if (*m->file && announce(m, listener)) goto done;
  for (int present = 1; present < net->ranks;) {
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    double left = deadline - now();
    hello h;
    int fd;
    if (left <= 0 || poll(&ready, 1, (int)(left * 1000)) <= 0) {
      epToolFail("rank 0: %d of %d ranks came within %d s", present, net->ranks, CONNECT_SECONDS);
      goto done;
    }
    fd = accept(listener, NULL, NULL);
    if (fd < 0) continue;
    tune(fd);
    if (receiveAll(fd, &h, sizeof(h)) || h.magic != HELLO || h.ranks != (uint32_t)net->ranks || !h.rank ||
        h.rank >= h.ranks || net->sockets[h.rank] >= 0 || sendAll(fd, &h, sizeof(h))) {
      close(fd); /* not one of us */
      continue;
    }
    net->sockets[h.rank] = fd;
    present++;
  }
  if (*m->file) unlink(m->file);
  rc = 0;
done:
  close(listener);
  return rc;
}

/* A file left by an older run names a port where nobody answers, or where somebody else does: try until it is right. */
static int join(epNet *net, meeting *m) {
  double deadline = now() + CONNECT_SECONDS;
  hello mine = {HELLO, (uint32_t)net->rank, (uint32_t)net->ranks}, reply;
  while (now() < deadline) {
    struct timespec nap = {0, 50 * 1000 * 1000};
    int fd = *m->file && readAnnouncement(m) ? -1 : dial(m->host, m->port);
    if (fd >= 0) {
      tune(fd);
      if (!sendAll(fd, &mine, sizeof(mine)) && !receiveAll(fd, &reply, sizeof(reply)) &&
          !memcmp(&mine, &reply, sizeof(mine))) {
        net->sockets[0] = fd;
        return 0;
      }
      close(fd);
    }
    nanosleep(&nap, NULL);
  }
  return epToolFail("rank %d: rank 0 did not answer at %s:%d within %d s", net->rank, m->host, m->port,
                    CONNECT_SECONDS);
}

int epNetOpen(const epNetPlace *place, epNet **out) {
  epNet *net = calloc(1, sizeof(*net));
  meeting m = {.host = "?"};
  if (!net) return epToolFail("out of host memory");
  net->rank = place->rank;
  net->ranks = place->ranks;
  net->sockets = malloc((size_t)place->ranks * sizeof(int));
  if (!net->sockets) {
    free(net);
    return epToolFail("out of host memory");
  }
  for (int i = 0; i < place->ranks; i++) net->sockets[i] = -1;
  if (findMeeting(place, &m) || (place->rank ? join(net, &m) : serve(net, &m))) {
    epNetClose(net);
    return -1;
  }
  *out = net;
  return 0;
}

int epNetGather(epNet *net, const void *mine, void *all, size_t bytes) {
  if (net->rank) {
    if (sendAll(net->sockets[0], mine, bytes) || receiveAll(net->sockets[0], all, bytes * (size_t)net->ranks))
      return epToolFail("rank %d: lost the connection to rank 0", net->rank);
    return 0;
  }
  memcpy(all, mine, bytes);
  for (int r = 1; r < net->ranks; r++)
    if (receiveAll(net->sockets[r], (char *)all + (size_t)r * bytes, bytes))
      return epToolFail("rank 0: lost the connection to rank %d", r);
  for (int r = 1; r < net->ranks; r++)
    if (sendAll(net->sockets[r], all, bytes * (size_t)net->ranks))
      return epToolFail("rank 0: lost the connection to rank %d", r);
  return 0;
}

void epNetClose(epNet *net) {
  if (!net) return;
  for (int i = 0; i < net->ranks; i++)
    if (net->sockets[i] >= 0) close(net->sockets[i]);
  free(net->sockets);
  free(net);
}
