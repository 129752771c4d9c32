/* The routing as a heat map: one row a source rank, one column a destination, darker is more; below it, how evenly the
 * experts are used. Large groups are drawn by blocks of ranks. */
#include "demo_picture.h"

#include <stdlib.h>

#define MAX_CELLS 16u
#define BAR_WIDTH 48u

static const char *shadeOf(double share, int utf8) {
  static const char *const blocks[] = {"  ", "░░", "▒▒", "▓▓", "██"}, *const letters[] = {"  ", "..", "--", "++", "##"};
  int level = share <= 0 ? 0 : share < 0.25 ? 1 : share < 0.5 ? 2 : share < 0.75 ? 3 : 4;
  return utf8 ? blocks[level] : letters[level];
}

/* Tokens from a block of ranks to a block of ranks. */
static uint64_t cellOf(const epRef *ref, uint32_t source, uint32_t destination, uint32_t per) {
  uint64_t sum = 0;
  for (uint32_t d = destination * per; d < (destination + 1) * per && d < ref->in.ranks; d++)
    for (uint32_t s = source * per; s < (source + 1) * per && s < ref->in.ranks; s++) sum += ref->rank[d].perSource[s];
  return sum;
}

static void drawMatrix(FILE *out, const epRef *ref, int utf8) {
  uint32_t per = (ref->in.ranks + MAX_CELLS - 1) / MAX_CELLS, cells = (ref->in.ranks + per - 1) / per;
  uint64_t most = 1;
  for (uint32_t s = 0; s < cells; s++)
    for (uint32_t d = 0; d < cells; d++) most = cellOf(ref, s, d, per) > most ? cellOf(ref, s, d, per) : most;
  fprintf(out, "  who sent how many tokens to whom%s\n\n  from \\ to ", per > 1 ? " (blocks of ranks)" : "");
  for (uint32_t d = 0; d < cells; d++) fprintf(out, " %7u", d * per);
  fprintf(out, "\n");
  for (uint32_t s = 0; s < cells; s++) {
    fprintf(out, "  rank %4u ", s * per);
    for (uint32_t d = 0; d < cells; d++) {
      uint64_t count = cellOf(ref, s, d, per);
      fprintf(out, " %s%5llu", shadeOf((double)count / (double)most, utf8), (unsigned long long)count);
    }
    fprintf(out, "\n");
  }
}

static void drawExperts(FILE *out, const epRef *ref, int utf8) {
  uint32_t experts = ref->in.experts, per = (experts + BAR_WIDTH - 1) / BAR_WIDTH, bars = (experts + per - 1) / per;
  uint64_t *sum = calloc(bars, sizeof(*sum)), most = 1;
  if (!sum) return;
  for (uint32_t e = 0; e < experts; e++) sum[e / per] += ref->rank[e / ref->locals].perExpert[e % ref->locals];
  for (uint32_t b = 0; b < bars; b++) most = sum[b] > most ? sum[b] : most;
  fprintf(out, "\n  use of the %u experts (one mark: %u)\n\n  ", experts, per);
  for (uint32_t b = 0; b < bars; b++)
    fprintf(out, utf8 && *shadeOf((double)sum[b] / (double)most, 1) != ' ' ? "%.3s" : "%.1s",
            shadeOf((double)sum[b] / (double)most, utf8));
  fprintf(out, "\n");
  free(sum);
}

void epDemoDraw(FILE *out, const epRef *ref, int utf8) {
  drawMatrix(out, ref, utf8);
  drawExperts(out, ref, utf8);
}
