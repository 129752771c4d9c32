/* SipHash-2-4-128 (Aumasson and Bernstein), chosen because it is a real keyed hash in forty lines: no library needed. */
#include "secret.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

bool epRmaRandom(void *bytes, size_t count) {
  uint8_t *to = bytes;
  while (count > 0) {
    ssize_t got = getrandom(to, count, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    count -= (size_t)got;
  }
  return true;
}

static uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static void rounds(uint64_t v[4], int count) {
  for (int i = 0; i < count; i++) {
    v[0] += v[1], v[2] += v[3];
    v[1] = rotate(v[1], 13) ^ v[0], v[3] = rotate(v[3], 16) ^ v[2];
    v[0] = rotate(v[0], 32);
    v[2] += v[1], v[0] += v[3];
    v[1] = rotate(v[1], 17) ^ v[2], v[3] = rotate(v[3], 21) ^ v[0];
    v[2] = rotate(v[2], 32);
  }
}

static void absorb(uint64_t v[4], uint64_t word) {
  v[3] ^= word;
  rounds(v, 2);
  v[0] ^= word;
}

void epRmaKeyedHash(const uint8_t key[EP_RMA_SECRET_BYTES], const void *message, size_t bytes,
                    uint8_t out[EP_RMA_SECRET_BYTES]) {
  const uint8_t *from = message;
  uint64_t k[2], word, result;
  memcpy(k, key, sizeof(k));
  uint64_t v[4] = {0x736f6d6570736575 ^ k[0], 0x646f72616e646f6d ^ k[1] ^ 0xee, 0x6c7967656e657261 ^ k[0],
                   0x7465646279746573 ^ k[1]};
  size_t left = bytes;
  for (; left >= 8; left -= 8, from += 8) {
    memcpy(&word, from, 8);
    absorb(v, word);
  }
  word = 0;
  memcpy(&word, from, left);
  absorb(v, word | (uint64_t)bytes << 56);
  v[2] ^= 0xee;
  rounds(v, 4);
  result = v[0] ^ v[1] ^ v[2] ^ v[3];
  memcpy(out, &result, 8);
  v[1] ^= 0xdd;
  rounds(v, 4);
  result = v[0] ^ v[1] ^ v[2] ^ v[3];
  memcpy(out + 8, &result, 8);
}

bool epRmaSameSecret(const uint8_t *a, const uint8_t *b) {
  uint8_t differ = 0;
  for (int i = 0; i < EP_RMA_SECRET_BYTES; i++) differ |= a[i] ^ b[i];
  return differ == 0;
}
