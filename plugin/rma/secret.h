/* Secrets of a communicator, and the keyed hash by which peers prove that they hold one without sending it. */
#ifndef EP_RMA_SECRET_H_
#define EP_RMA_SECRET_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EP_RMA_SECRET_BYTES = 16 };

bool epRmaRandom(void *bytes, size_t count); /* false: the system has no random numbers */
/* SipHash-2-4 with 128 bits of output: a keyed hash for short messages. */
void epRmaKeyedHash(const uint8_t key[EP_RMA_SECRET_BYTES], const void *message, size_t bytes,
                    uint8_t out[EP_RMA_SECRET_BYTES]);
bool epRmaSameSecret(const uint8_t *a, const uint8_t *b); /* takes as long whatever differs */

#endif
