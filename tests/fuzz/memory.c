/* What fuzzed calls are given: memory that ends where it must, descriptors and structs that are gone right after the call. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

void fuzzFail(const fuzzRank *me, const char *format, ...) {
  va_list args;
  va_start(args, format);
  fprintf(stderr, "fuzz: rank %d: ", me ? me->rank : -1);
  vfprintf(stderr, format, args);
  fprintf(stderr, "\n");
  va_end(args);
  abort();
}

static void fuzzPush(fuzzBlock **list, void *ptr) {
  fuzzBlock *block = malloc(sizeof *block);
  if (!block || !ptr) fuzzFail(NULL, "out of memory");
  *block = (fuzzBlock){*list, ptr};
  *list = block;
}

void *fuzzKeep(fuzzBlock **list, size_t bytes) {
  void *ptr = calloc(1, bytes ? bytes : 1);
  fuzzPush(list, ptr);
  return ptr;
}

void fuzzRelease(fuzzBlock **list) {
  while (*list) {
    fuzzBlock *block = *list;
    *list = block->next;
    free(block->ptr);
    free(block);
  }
}

void *fuzzDevice(fuzzRank *me, size_t bytes, int fill) {
  void *ptr = NULL;
  if (ncclEpEmuMalloc(me->comm, &ptr, bytes, "fuzz") != ncclSuccess) {
    if (!strstr(ncclEpGetLastErrorString(), "stuck"))
      fuzzFail(me, "%zu bytes of emulated memory: %s", bytes, ncclEpGetLastErrorString());
    return NULL; /* its cause is in the fabric's report */
  }
  fuzzPush(&me->device, ptr);
  if (fill >= 0 && bytes) (void)ncclEpEmuMemset(me->comm, ptr, fill, bytes, NULL); /* the same */
  return ptr;
}

void *fuzzStruct(fuzzRank *me, const void *from, size_t bytes) {
  struct {
    unsigned size, magic;
  } head;
  unsigned char *to;
  memcpy(&head, from, sizeof head);
  if (fuzzWrong(&me->in)) {
    static const unsigned magics[] = {0, NCCL_EP_TENSOR_MAGIC, 0xffffffffu};
    const unsigned n = fuzzPick(&me->in, 8), less = fuzzByte(&me->in);
    if (n == 0) return NULL;
    if (n < 4)
      head.magic = magics[n - 1];
    else if (n == 4)
      head.size = 0xffffffffu;
    else if (n == 5)
      head.size += 8;
    else
      head.size = less % (unsigned)bytes;
  }
  to = fuzzKeep(&me->call, head.size < sizeof head ? sizeof head : head.size < bytes ? head.size : bytes);
  memcpy(to, from, head.size < sizeof head ? sizeof head : head.size < bytes ? head.size : bytes);
  memcpy(to, &head, sizeof head);
  return to;
}

size_t fuzzTypeBytes(ncclDataType_t type) {
  static const unsigned char bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1};
  return (unsigned)type < sizeof bytes ? bytes[type] : 1;
}

static size_t fuzzShapeBytes(const fuzzShape *s) {
  size_t bytes = fuzzTypeBytes(s->type);
  for (unsigned i = 0; i < s->ndim; i++) bytes *= s->sizes[i];
  return s->bytes ? s->bytes : bytes;
}

enum {
  WRONG_NULL,
  WRONG_MAGIC,
  WRONG_SIZE,
  WRONG_NDIM,
  WRONG_TYPE,
  WRONG_EXTENT,
  WRONG_NO_SIZES,
  WRONG_NO_DATA,
  WRONG_HOST,
  WRONG_ALIGN,
  WRONG_SMALL,
  WRONG_FREED,
  WRONG_OFFSET,
  WRONG_WINDOW,
  WRONGS
};

ncclEpTensor_t *fuzzTensor(fuzzRank *me, const fuzzShape *shape) {
  fuzzBytes *in = &me->in;
  fuzzShape s = *shape;
  const int wrong = fuzzWrong(in) ? (int)fuzzPick(in, WRONGS) : -1, window = fuzzPick(in, 8) == 7;
  const unsigned how = wrong < 0 ? 0 : fuzzByte(in);
  ncclEpTensor_t *t;
  size_t bytes;
  int huge = 0;
  me->filled = NULL;
  if (wrong == WRONG_NULL) return NULL;
  if (wrong == WRONG_TYPE) s.type = (ncclDataType_t)(how % 15 - 1);
  if (wrong == WRONG_EXTENT) {
    static const size_t extents[] = {0, 1, SIZE_MAX, (size_t)1 << 32, ((size_t)1 << 32) + 1, SIZE_MAX / 2 + 1};
    size_t *extent = &s.sizes[how % s.ndim];
    *extent = how / 3 % 8 < 6 ? extents[how / 3 % 8] : how / 3 % 8 == 6 ? *extent + 1 : *extent - (*extent > 0);
    /* Larger ones may be accepted: where their memory is too small, too, that is the caller's fault. */
    if (how / 3 % 8 < 6) me->blind = huge = 1;
  }
  bytes = fuzzShapeBytes(huge ? shape : &s);
  t = fuzzKeep(&me->call, sizeof *t);
  *t = NCCL_EP_TENSOR_INIT;
  t->ndim = s.ndim, t->datatype = s.type;
  t->sizes = fuzzKeep(&me->call, s.ndim * sizeof(size_t));
  memcpy(t->sizes, s.sizes, s.ndim * sizeof(size_t));
  if (wrong == WRONG_MAGIC) t->magic = how % 2 ? 0 : NCCL_EP_MAGIC;
  if (wrong == WRONG_SIZE) t->size = how % sizeof *t;
  if (wrong == WRONG_NDIM) t->ndim = how % 12;
  if (wrong == WRONG_NDIM && t->ndim > s.ndim) t->sizes = fuzzKeep(&me->call, t->ndim * sizeof(size_t));
  if (wrong == WRONG_NO_SIZES) t->sizes = NULL;
  if (wrong == WRONG_NO_DATA || (!bytes && wrong < 0)) return t;
  if (wrong == WRONG_SMALL) me->blind = 1, bytes /= 2;
  if (wrong == WRONG_HOST) {
    t->data = fuzzKeep(&me->call, bytes);
  } else if (window || wrong == WRONG_OFFSET || wrong == WRONG_WINDOW) {
    const size_t room = (bytes + 255) / 256 * 256;
    if (me->windowUsed + room > FUZZ_WINDOW_BYTES) {
      t->data = fuzzDevice(me, bytes, s.fill < 0 ? 0 : s.fill);
    } else {
      t->win_hdl = me->window, t->win_offset = me->windowUsed;
      if (bytes) (void)ncclEpEmuMemset(me->comm, me->windowBase + me->windowUsed, s.fill < 0 ? 0 : s.fill, bytes, NULL);
      me->windowUsed += room;
    }
    if (wrong == WRONG_OFFSET) {
      static const uint64_t offsets[] = {FUZZ_WINDOW_BYTES, FUZZ_WINDOW_BYTES - 16, UINT64_MAX, UINT64_MAX - 15, 1, 8};
      t->data = NULL, t->win_hdl = me->window, t->win_offset = offsets[how % 6];
      me->blind = 1; /* the last two may lie inside, and there on other tensors */
    }
    if (wrong == WRONG_WINDOW) t->data = NULL, t->win_hdl = (ncclWindow_t)(uintptr_t)(how % 2 ? 16 : (uintptr_t)t);
  } else {
    static const unsigned shifts[] = {1, 4, 8};
    uint8_t *memory = fuzzDevice(me, bytes + (wrong == WRONG_ALIGN ? 16 : 0), s.fill);
    if (!memory) return t;
    t->data = memory + (wrong == WRONG_ALIGN ? shifts[how % 3] : 0);
    if (wrong == WRONG_FREED) {
      fuzzBlock *block = me->device;
      fuzzSync(me);
      (void)ncclEpEmuFree(me->comm, memory);
      me->device = block->next;
      free(block);
    }
  }
  if (wrong < 0) me->filled = t->data ? t->data : me->windowBase + t->win_offset;
  return t;
}

ncclResult_t fuzzResult(fuzzRank *me, const char *call, ncclResult_t result) {
  const char *line = ncclEpGetLastErrorString();
  if (getenv("FUZZ_TRACE"))
    fprintf(stderr, "rank %d: %s: %d %s\n", me->rank, call, (int)result, result == ncclSuccess ? "" : line);
  if (result == ncclRemoteError || result == ncclInternalError) me->lost = 1;
  if (!me->lost && me->resultCount < FUZZ_RESULTS) me->results[me->resultCount++] = (uint8_t)result;
  if (result != ncclSuccess) {
    if ((int)result < 0 || result > ncclInProgress) fuzzFail(me, "%s: result %d", call, (int)result);
    if (!line[0] || strchr(line, '\n')) fuzzFail(me, "%s: result %d with the line \"%s\"", call, (int)result, line);
    const size_t length = strlen(call);
    if (strncmp(line, call, length) != 0 || strncmp(line + length, ": ", 2) != 0 ||
        strncmp(line + length + 2, "ncclEp", 6) == 0)
      fuzzFail(me, "%s: the line does not begin with the call alone: \"%s\"", call, line);
    if (result == ncclInternalError && !strstr(line, "stuck")) fuzzFail(me, "%s: internal error: %s", call, line);
  }
  fuzzRelease(&me->call);
  return result;
}
