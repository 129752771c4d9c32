/* Which groups, handles and heap tensors exist. Public pointers are looked up here before they are followed, so that use after
 * destroy is an error instead of undefined (an address that a newer object has taken over cannot be told apart). */
#ifndef EP_HOST_OBJECT_H_
#define EP_HOST_OBJECT_H_

typedef enum { EP_OBJECT_GROUP, EP_OBJECT_HANDLE, EP_OBJECT_TENSOR, EP_OBJECT_KINDS } epObjectKind;

/* 0 when out of memory. */
int epObjectAdd(const void *object, epObjectKind kind);
/* 1 when it was there. */
int epObjectRemove(const void *object, epObjectKind kind);
int epObjectExists(const void *object, epObjectKind kind);

#endif
