/* Listening: one TCP socket an interface, bound to its address, and a UNIX socket for peers of this host. */
#include "handle.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static bool sameHostId(uint64_t *id) {
  struct {
    char boot[40];
    uint64_t device, inode;
  } text = {{0}, 0, 0};
  uint8_t hash[EP_RMA_SECRET_BYTES];
  const uint8_t key[EP_RMA_SECRET_BYTES] = "ep: which host?";
  struct stat net;
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
  if (!file) return false;
  bool ok = fgets(text.boot, sizeof(text.boot), file) != NULL;
  fclose(file);
  /* Abstract UNIX sockets are seen within a network namespace. */
  if (!ok || stat("/proc/self/ns/net", &net) != 0) return false;
  text.device = net.st_dev, text.inode = net.st_ino;
  epRmaKeyedHash(key, &text, sizeof(text), hash);
  memcpy(id, hash, sizeof(*id));
  return *id != 0;
}

socklen_t epRmaUnixName(uint64_t name, struct sockaddr_un *address) {
  memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  int length =
      snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "nccl-rma-ep-%016llx", (unsigned long long)name);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static void packAddress(const struct sockaddr_storage *from, uint8_t to[16], uint16_t *port) {
  memset(to, 0, 16);
  if (from->ss_family == AF_INET6) {
    const struct sockaddr_in6 *in6 = (const void *)from;
    memcpy(to, &in6->sin6_addr, 16);
    *port = in6->sin6_port;
  } else {
    const struct sockaddr_in *in = (const void *)from;
    to[10] = to[11] = 0xff;
    memcpy(to + 12, &in->sin_addr, 4);
    *port = in->sin_port;
  }
}

void epRmaHandleAddress(const epRmaHandle *handle, unsigned at, struct sockaddr_storage *to) {
  const uint8_t *from = handle->address[at];
  uint16_t port = handle->ports[at];
  struct in6_addr address;
  memset(to, 0, sizeof(*to));
  memcpy(&address, from, 16);
  if (IN6_IS_ADDR_V4MAPPED(&address)) {
    struct sockaddr_in *in = (void *)to;
    in->sin_family = AF_INET, in->sin_port = port;
    memcpy(&in->sin_addr, from + 12, 4);
  } else {
    struct sockaddr_in6 *in6 = (void *)to;
    in6->sin6_family = AF_INET6, in6->sin6_port = port, in6->sin6_addr = address;
  }
}

void epRmaHandleName(const epRmaHandle *handle, bool local, char *out, size_t bytes) {
  char text[INET6_ADDRSTRLEN] = "?";
  struct sockaddr_storage address;
  if (local) {
    snprintf(out, bytes, "this host");
    return;
  }
  epRmaHandleAddress(handle, 0, &address);
  if (address.ss_family == AF_INET)
    inet_ntop(AF_INET, &((struct sockaddr_in *)(void *)&address)->sin_addr, text, sizeof(text));
  else
    inet_ntop(AF_INET6, &((struct sockaddr_in6 *)(void *)&address)->sin6_addr, text, sizeof(text));
  snprintf(out, bytes, "%s port %u", text, ntohs(handle->ports[0]));
}

static int listenAt(const struct sockaddr *address, socklen_t bytes) {
  int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  if (bind(fd, address, bytes) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
  int error = errno;
  close(fd);
  errno = error;
  return -1;
}

epRmaResult epRmaListen(void *handle, epRmaListener **out) {
  epRmaResult rc = EP_RMA_SYSTEM_ERROR;
  struct sockaddr_un local;
  epRmaListener *listener = calloc(1, sizeof(*listener));
  if (!listener) {
    EP_RMA_WARN("no memory for a listener");
    return EP_RMA_SYSTEM_ERROR;
  }
  for (int i = 0; i <= EP_RMA_MAX_INTERFACES; i++) listener->fds[i] = -1;
  epRmaHandle *text = &listener->handle;
  text->magic = EP_RMA_HANDLE_MAGIC;
  rc = epRmaSettingsRead(&listener->settings);
  if (rc) goto fail;
  rc = EP_RMA_SYSTEM_ERROR;
  text->sockets = (uint16_t)listener->settings.sockets;
  text->addresses = (uint16_t)listener->settings.interfaceCount;
  if (!epRmaRandom(text->secret, sizeof(text->secret)) || !epRmaRandom(&text->name, sizeof(text->name))) {
    EP_RMA_WARN("no random numbers for a secret: %s", strerror(errno));
    goto fail;
  }
  for (int i = 0; i < listener->settings.interfaceCount; i++) {
    struct sockaddr_storage address = listener->settings.interfaces[i].address;
    socklen_t bytes = epRmaAddressBytes(&address);
    listener->fds[i] = listenAt((struct sockaddr *)&address, bytes);
    if (listener->fds[i] < 0 || getsockname(listener->fds[i], (struct sockaddr *)&address, &bytes) != 0) {
      EP_RMA_WARN("cannot listen on interface %s: %s", listener->settings.interfaces[i].name, strerror(errno));
      goto fail;
    }
    packAddress(&address, text->address[i], &text->ports[i]);
  }
  if (listener->settings.local && sameHostId(&text->host)) {
    listener->fds[EP_RMA_MAX_INTERFACES] = listenAt((struct sockaddr *)&local, epRmaUnixName(text->name, &local));
    if (listener->fds[EP_RMA_MAX_INTERFACES] < 0) {
      EP_RMA_INFO("peers of this host are reached by TCP: no UNIX socket: %s", strerror(errno));
      text->host = 0;
    }
  }
  memset(handle, 0, EP_RMA_HANDLE_BYTES);
  memcpy(handle, text, sizeof(*text));
  *out = listener;
  return EP_RMA_OK;
fail:
  epRmaCloseListener(listener);
  return rc;
}

void epRmaCloseListener(epRmaListener *listener) {
  for (int i = 0; i <= EP_RMA_MAX_INTERFACES; i++)
    if (listener->fds[i] >= 0) close(listener->fds[i]);
  free(listener);
}

const epRmaSettings *epRmaListenerSettings(const epRmaListener *listener) { return &listener->settings; }
