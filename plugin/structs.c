/* Reading and writing of structs whose caller may be older or newer than the library. */
#include "structs.h"

#include <string.h>

#include "fail.h"

typedef struct epStructHead {
  unsigned int size, magic;
} epStructHead;

ncclResult_t epTakeStruct(const char *call, const char *name, const void *from, unsigned least, unsigned field,
                          void *to, unsigned bytes) {
  const epStructHead current = {bytes, NCCL_EP_MAGIC};
  epStructHead head;
  unsigned covered;
  if (!from)
    return epFail(ncclInvalidArgument, "%s: %s is NULL: expected a struct filled by its _INIT macro", call, name);
  memcpy(&head, from, sizeof head);
  if (head.magic != NCCL_EP_MAGIC)
    return epFail(ncclInvalidArgument, "%s: %s has magic %#x: expected %#x (fill it with its _INIT macro)", call, name,
                  head.magic, NCCL_EP_MAGIC);
  if (head.size < least)
    return epFail(ncclInvalidArgument, "%s: %s has size %u: expected at least %u", call, name, head.size, least);
  covered = head.size < bytes ? head.size / field * field : bytes;
  memset(to, 0, bytes);
  memcpy(to, from, covered > least ? covered : least);
  memcpy(to, &current, sizeof current);
  return ncclSuccess;
}

ncclResult_t epTakeOptional(const char *call, const char *name, const void *from, unsigned least, unsigned field,
                            void *to, unsigned bytes) {
  const epStructHead current = {bytes, NCCL_EP_MAGIC};
  if (from) return epTakeStruct(call, name, from, least, field, to, bytes);
  memset(to, 0, bytes);
  memcpy(to, &current, sizeof current);
  return ncclSuccess;
}

void epGiveStruct(const void *from, unsigned bytes, void *to) {
  epStructHead head;
  memcpy(&head, to, sizeof head);
  memcpy((char *)to + sizeof head, (const char *)from + sizeof head,
         (head.size < bytes ? head.size : bytes) - sizeof head);
}
