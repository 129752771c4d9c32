/* Environment variables and the interfaces they name. NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY mean what they mean to
 * NCCL: prefixes by comma, '=' for whole names, '^' for all but these. */
#include "settings.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "log.h"

static epRmaResult number(const char *name, int low, int high, int value, int *out) {
  const char *text = getenv(name);
  if (text && *text) {
    char *end = NULL;
    errno = 0;
    long read = strtol(text, &end, 10);
    if (errno || *end || read < low || read > high) {
      EP_RMA_WARN("%s is \"%s\": a number from %d to %d is expected", name, text, low, high);
      return EP_RMA_INVALID_USAGE;
    }
    value = (int)read;
  }
  *out = value;
  return EP_RMA_OK;
}

socklen_t epRmaAddressBytes(const struct sockaddr_storage *address) {
  return address->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

static bool listed(const char *list, bool whole, const char *name) {
  while (*list) {
    size_t length = strcspn(list, ",");
    if (length > 0 && (whole ? strlen(name) == length : strlen(name) >= length) && strncmp(list, name, length) == 0)
      return true;
    list += length;
    list += *list == ',';
  }
  return false;
}

/* How good an interface is where none was named: Ethernet and the like, then containers' bridges, then loopback. */
static int rankOf(const struct ifaddrs *at) {
  if (at->ifa_flags & IFF_LOOPBACK) return 2;
  return strncmp(at->ifa_name, "docker", 6) == 0 || strncmp(at->ifa_name, "virbr", 5) == 0;
}

static bool usable(const struct ifaddrs *at, int family) {
  if (!at->ifa_addr || !(at->ifa_flags & IFF_UP)) return false;
  int is = at->ifa_addr->sa_family;
  if ((is != AF_INET && is != AF_INET6) || (family && is != family)) return false;
  /* A link-local address means nothing without the interface it was seen on. */
  return is == AF_INET || !IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)(void *)at->ifa_addr)->sin6_addr);
}

static int speedOf(const char *name) {
  char path[64];
  int speed = 0;
  snprintf(path, sizeof(path), "/sys/class/net/%s/speed", name);
  FILE *file = fopen(path, "re");
  if (!file) return 10000;
  char text[32] = "";
  if (fgets(text, sizeof(text), file)) speed = (int)strtol(text, NULL, 10);
  fclose(file);
  return speed > 0 ? speed : 10000;
}

static void take(epRmaSettings *settings, const struct ifaddrs *at) {
  for (int i = 0; i < settings->interfaceCount; i++)
    if (strcmp(settings->interfaces[i].name, at->ifa_name) == 0) return;
  if (settings->interfaceCount == EP_RMA_MAX_INTERFACES) return;
  epRmaInterface *to = &settings->interfaces[settings->interfaceCount++];
  memset(to, 0, sizeof(*to));
  snprintf(to->name, sizeof(to->name), "%s", at->ifa_name);
  memcpy(&to->address, at->ifa_addr,
         at->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
  to->speed = speedOf(at->ifa_name);
}

static epRmaResult interfaces(epRmaSettings *settings) {
  const char *list = getenv("NCCL_SOCKET_IFNAME"), *family = getenv("NCCL_SOCKET_FAMILY");
  int wanted = !family ? 0 : strcmp(family, "AF_INET") == 0 ? AF_INET : strcmp(family, "AF_INET6") == 0 ? AF_INET6 : 0;
  struct ifaddrs *all = NULL;
  if (getifaddrs(&all) != 0) {
    EP_RMA_WARN("the network interfaces cannot be listed: %s", strerror(errno));
    return EP_RMA_SYSTEM_ERROR;
  }
  if (list && *list) {
    bool except = *list == '^';
    const char *names = list + except;
    bool whole = *names == '=';
    names += whole;
    /* IPv4 first, so that hosts with both agree. */
    for (int pass = 0; pass < 2; pass++)
      for (const struct ifaddrs *at = all; at; at = at->ifa_next)
        if (usable(at, wanted) && (at->ifa_addr->sa_family == AF_INET6) == pass &&
            listed(names, whole, at->ifa_name) != except && !(except && rankOf(at) == 2))
          take(settings, at);
  } else {
    for (int goodness = 0; goodness < 6 && settings->interfaceCount == 0; goodness++)
      for (const struct ifaddrs *at = all; at && settings->interfaceCount == 0; at = at->ifa_next)
        if (usable(at, wanted) && rankOf(at) == goodness / 2 && (at->ifa_addr->sa_family == AF_INET6) == goodness % 2)
          take(settings, at);
  }
  freeifaddrs(all);
  if (settings->interfaceCount > 0) return EP_RMA_OK;
  EP_RMA_WARN("no network interface that is up fits NCCL_SOCKET_IFNAME=%s NCCL_SOCKET_FAMILY=%s",
              list ? list : "(unset)", family ? family : "(unset)");
  return EP_RMA_SYSTEM_ERROR;
}

epRmaResult epRmaSettingsRead(epRmaSettings *settings) {
  int local = 1;
  memset(settings, 0, sizeof(*settings));
  epRmaResult rc = number("NCCL_EP_RMA_SOCKETS", 1, EP_RMA_MAX_SOCKETS, 2, &settings->sockets);
  if (!rc) rc = number("NCCL_EP_RMA_TIMEOUT_MS", 100, 86400000, 60000, &settings->timeoutMs);
  if (!rc) rc = number("NCCL_EP_RMA_LOCAL", 0, 1, 1, &local);
  settings->local = local != 0;
  return rc ? rc : interfaces(settings);
}
