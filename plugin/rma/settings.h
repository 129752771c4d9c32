/* What the environment says: interfaces, sockets, patience. Read when a communicator listens, so nccl.conf works. */
#ifndef EP_RMA_SETTINGS_H_
#define EP_RMA_SETTINGS_H_

#include <netinet/in.h>

#include "abi.h"

enum { EP_RMA_MAX_INTERFACES = 4, EP_RMA_MAX_SOCKETS = 8 };

typedef struct {
  char name[16];
  struct sockaddr_storage address; /* port 0 */
  int speed;                       /* Mbit/s, 10000 where the kernel does not know */
} epRmaInterface;

typedef struct {
  epRmaInterface interfaces[EP_RMA_MAX_INTERFACES];
  int interfaceCount;
  int sockets;   /* a peer */
  int timeoutMs; /* how long a peer may stand still */
  bool local;    /* peers of one host: UNIX sockets and GPU copies; else TCP as between hosts */
} epRmaSettings;

epRmaResult epRmaSettingsRead(epRmaSettings *settings);
socklen_t epRmaAddressBytes(const struct sockaddr_storage *address);

#endif
