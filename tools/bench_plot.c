/* Drawing of ep_bench's result: bars by case, with 10th and 90th percentile, or bandwidth against SMs. Widths are those of
 * the page; text is the browser's. */
#include "bench_plot.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "failure.h"

#define WIDTH 960.0
#define LEFT 190.0  /* names */
#define RIGHT 280.0 /* figures */
#define BAR 18.0
#define STEP 26.0
#define TOP 74.0
#define CURVE_HEIGHT 360.0

static const char style[] =
    "<style>text{font:13px "
    "system-ui,sans-serif;fill:#222}.h{font-size:17px;font-weight:600}.c{font-size:14px;font-weight:600}"
    ".s{font-size:11px;fill:#666}.o{fill:#2f6fde}.n{fill:#e08a1e}.l{fill:#9aa3ad}.w{stroke:#222;stroke-width:1.5}"
    ".g{stroke:#ddd}.a{fill:none;stroke:#2f6fde;stroke-width:2}.b{fill:none;stroke:#1b9e77;stroke-width:2}"
    ".q{fill:#1b9e77}</style>\n";

/* Text of a command line may hold what is markup. */
static void escaped(FILE *out, const char *text) {
  for (; *text; text++) switch (*text) {
    case '<':
      fputs("&lt;", out);
      break;
    case '>':
      fputs("&gt;", out);
      break;
    case '&':
      fputs("&amp;", out);
      break;
    default:
      fputc(*text, out);
    }
}

static void text(FILE *out, double x, double y, const char *kind, const char *anchor, const char *what) {
  fprintf(out, "<text x='%.1f' y='%.1f' class='%s' text-anchor='%s'>", x, y, kind, anchor);
  escaped(out, what);
  fputs("</text>\n", out);
}

static void heading(FILE *out, const epBenchResult *r, const char *what) {
  char line[512], version[32];
  const epBenchOptions *o = r->options;
  epBenchVersion(version, sizeof(version));
  text(out, 16, 26, "h", "start", what);
  snprintf(line, sizeof(line),
           "%u x %s; hidden %u, top-k %u, experts %u, %s, routing %s; median and 10th to 90th percentile of %u",
           o->ranks, r->ranks[0].name, o->hidden, o->topk, o->experts, epRefTypeName(o->type), o->routingText,
           o->iters);
  text(out, 16, 44, "s", "start", line);
  snprintf(line, sizeof(line), "NCCL EP %s%s%s", version, r->versions,
           r->cuda ? "" : "; emulated: says nothing about GPUs");
  text(out, 16, 58, "s", "start", line);
}

static void openSvg(FILE *out, double height) {
  fprintf(out, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %.0f %.0f' width='%.0f' height='%.0f'>\n", WIDTH,
          height, WIDTH, height);
  fputs(style, out);
  fprintf(out, "<rect width='%.0f' height='%.0f' fill='white'/>\n", WIDTH, height);
}

/* ---- Bars ---------------------------------------------------------------------------------------------------------- */

static int startsCase(const epBenchResult *r, unsigned i) {
  return i == 0 || strcmp(r->rows[i].label, r->rows[i - 1].label) != 0;
}

/* Longest whisker of the case that row i belongs to: each case has its own scale. */
static double longest(const epBenchResult *r, unsigned i) {
  double most = 0;
  for (unsigned j = 0; j < r->rowCount; j++) {
    epBenchSummary s = epBenchSummarise(&r->rows[j]);
    if (!strcmp(r->rows[j].label, r->rows[i].label) && s.p90 > most) most = s.p90;
  }
  return most;
}

static void bars(FILE *out, const epBenchResult *r) {
  double y = TOP, room = WIDTH - LEFT - RIGHT;
  unsigned cases = 0;
  for (unsigned i = 0; i < r->rowCount; i++) cases += (unsigned)startsCase(r, i);
  openSvg(out, TOP + STEP * r->rowCount + 1.2 * STEP * cases + 12);
  heading(out, r, r->options->compare ? "Dispatch and combine beside the link and NCCL" : "Dispatch and combine");
  for (unsigned i = 0; i < r->rowCount; i++) {
    const epBenchRow *row = &r->rows[i];
    epBenchSummary s = epBenchSummarise(row);
    double scale = longest(r, i) > 0 ? room / longest(r, i) : 0;
    char figures[128];
    if (startsCase(r, i)) {
      y += 1.2 * STEP;
      text(out, 16, y - 8, "c", "start", row->label);
    }
    text(out, LEFT - 8, y + 13, "", "end", row->name);
    fprintf(out, "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' class='%s'/>\n", LEFT, y, s.median * scale, BAR,
            !strncmp(row->name, "li", 2)     ? "l"
            : !strncmp(row->name, "nccl", 4) ? "n"
                                             : "o");
    fprintf(out, "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' class='w'/>\n", LEFT + s.p10 * scale, y + BAR / 2,
            LEFT + s.p90 * scale, y + BAR / 2);
    snprintf(figures, sizeof(figures), "%.1f us (%.1f to %.1f), %.0f GB/s", s.median, s.p10, s.p90,
             epBenchBandwidth(row->busBytes, s.median));
    text(out, LEFT + room + 8, y + 13, "", "start", figures);
    y += STEP;
  }
  fputs("</svg>\n", out);
}

/* ---- Curve --------------------------------------------------------------------------------------------------------- */

static void line(FILE *out, const epBenchResult *r, const char *name, double xScale, double yScale, int second) {
  double bottom = TOP + CURVE_HEIGHT;
  fprintf(out, "<polyline class='%s' points='", second ? "b" : "a");
  for (unsigned i = 0; i < r->rowCount; i++) {
    const epBenchRow *row = &r->rows[i];
    if (strcmp(row->name, name) != 0) continue;
    fprintf(out, "%.1f,%.1f ", LEFT + row->sms * xScale,
            bottom - epBenchBandwidth(row->busBytes, epBenchSummarise(row).median) * yScale);
  }
  fputs("'/>\n", out);
  for (unsigned i = 0; i < r->rowCount; i++) {
    const epBenchRow *row = &r->rows[i];
    double value = epBenchBandwidth(row->busBytes, epBenchSummarise(row).median);
    char figure[32];
    if (strcmp(row->name, name) != 0) continue;
    fprintf(out, "<circle cx='%.1f' cy='%.1f' r='3.5' class='%s'/>\n", LEFT + row->sms * xScale,
            bottom - value * yScale, second ? "q" : "o");
    snprintf(figure, sizeof(figure), "%.0f", value);
    text(out, LEFT + row->sms * xScale, bottom - value * yScale + (second ? 18 : -8), "s", "middle", figure);
  }
  fprintf(out, "<circle cx='%.1f' cy='%.1f' r='5' class='%s'/>\n", WIDTH - RIGHT + 30, TOP + (second ? 44 : 20),
          second ? "q" : "o");
  text(out, WIDTH - RIGHT + 42, TOP + (second ? 48 : 24), "", "start", name);
}

static void curve(FILE *out, const epBenchResult *r) {
  double most = 0, right = 0, room = WIDTH - LEFT - RIGHT;
  char title[128], figure[32];
  for (unsigned i = 0; i < r->rowCount; i++) {
    double value = epBenchBandwidth(r->rows[i].busBytes, epBenchSummarise(&r->rows[i]).median);
    most = value > most ? value : most;
    right = r->rows[i].sms > right ? r->rows[i].sms : right;
  }
  if (most <= 0) most = 1;
  openSvg(out, TOP + CURVE_HEIGHT + 56);
  snprintf(title, sizeof(title), "Bandwidth against SMs: %s, %s tokens a rank", epBenchLayoutName(r->options->layout),
           r->options->tokensText);
  heading(out, r, title);
  for (int i = 0; i <= 4; i++) {
    double y = TOP + CURVE_HEIGHT * (1 - i / 4.4);
    fprintf(out, "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' class='g'/>\n", LEFT, y, LEFT + room, y);
    snprintf(figure, sizeof(figure), "%.3g GB/s", most * i / 4);
    text(out, LEFT - 8, y + 4, "s", "end", figure);
  }
  for (unsigned i = 0; i < r->options->curveCount; i++) {
    snprintf(figure, sizeof(figure), "%u", r->options->curve[i]);
    text(out, LEFT + r->options->curve[i] * room / right, TOP + CURVE_HEIGHT + 18, "s", "middle", figure);
  }
  text(out, LEFT + room / 2, TOP + CURVE_HEIGHT + 40, "", "middle", "SMs that the library may use");
  line(out, r, "dispatch", room / right, CURVE_HEIGHT / 1.1 / most, 0);
  line(out, r, "combine", room / right, CURVE_HEIGHT / 1.1 / most, 1);
  fputs("</svg>\n", out);
}

/* ---- Page ---------------------------------------------------------------------------------------------------------- */

static void table(FILE *out, const epBenchResult *r) {
  fputs("<table><tr><th>case<th>operation<th>SMs<th>bytes over the link<th>median us<th>p10<th>p90<th>GB/s</tr>\n",
        out);
  for (unsigned i = 0; i < r->rowCount; i++) {
    const epBenchRow *row = &r->rows[i];
    epBenchSummary s = epBenchSummarise(row);
    fprintf(out, "<tr><td>%s<td>%s<td>", row->label, row->name);
    if (row->sms) fprintf(out, "%u", row->sms);
    fprintf(out, "<td>%.0f<td>%.1f<td>%.1f<td>%.1f<td>%.2f</tr>\n", row->busBytes, s.median, s.p10, s.p90,
            epBenchBandwidth(row->busBytes, s.median));
  }
  fputs("</table>\n<pre>", out);
  escaped(out, r->options->command);
  fputs("\n", out);
  for (uint32_t i = 0; r->clocks && i < r->options->ranks; i++)
    if (!*r->clocks[i].missing)
      fprintf(out, "rank %u: SM clock %u to %u MHz, memory %u MHz, driver %s\n", i, r->clocks[i].smLow,
              r->clocks[i].smHigh, r->clocks[i].memory, r->clocks[i].driver);
  escaped(out, r->skipped);
  fputs("</pre>\n", out);
}

int epBenchPlot(const epBenchResult *r, const char *path) {
  const char *ending = strrchr(path, '.');
  int page = ending && !strcmp(ending, ".html"), bad;
  FILE *out = fopen(path, "w");
  if (!out) return epToolFail("--plot %s: cannot write it: %s", path, strerror(errno));
  if (page)
    fputs(
        "<!doctype html><meta charset='utf-8'><title>ep_bench</title><style>body{font:13px system-ui,sans-serif;margin:"
        "24px}table{border-collapse:collapse}td,th{padding:3px 12px;border-bottom:1px solid #ddd;text-align:right}"
        "td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}</style>\n",
        out);
  if (r->options->curveCount)
    curve(out, r);
  else
    bars(out, r);
  if (page) table(out, r);
  bad = ferror(out);
  return fclose(out) || bad ? epToolFail("--plot %s: cannot write it: %s", path, strerror(errno)) : 0;
}
