/* What a listener tells its peers through NCCL's bootstrap, and the listener itself. */
#ifndef EP_RMA_HANDLE_H_
#define EP_RMA_HANDLE_H_

#include <sys/un.h>

#include "rma.h"

#define EP_RMA_HANDLE_MAGIC 0x316d72706563636eull /* the version is in it */

/* What NCCL carries for us: at most EP_RMA_HANDLE_BYTES. */
typedef struct {
  uint64_t magic;
  uint64_t host; /* equal where UNIX sockets reach */
  uint64_t name; /* of the UNIX socket */
  uint8_t secret[EP_RMA_SECRET_BYTES];
  uint16_t sockets;
  uint16_t addresses;
  uint16_t ports[EP_RMA_MAX_INTERFACES];      /* network order */
  uint8_t address[EP_RMA_MAX_INTERFACES][16]; /* IPv6, or IPv4 mapped */
} epRmaHandle;
_Static_assert(sizeof(epRmaHandle) <= EP_RMA_HANDLE_BYTES, "NCCL carries 128 bytes");

struct epRmaListener {
  epRmaSettings settings;
  epRmaHandle handle;
  int fds[EP_RMA_MAX_INTERFACES + 1]; /* TCP by interface, then UNIX; -1: none */
};

socklen_t epRmaUnixName(uint64_t name, struct sockaddr_un *address);
void epRmaHandleAddress(const epRmaHandle *handle, unsigned at, struct sockaddr_storage *to);
/* For messages. */
void epRmaHandleName(const epRmaHandle *handle, bool local, char *out, size_t bytes);

#endif
