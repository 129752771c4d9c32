/* Runs NVRTC on one text with headers from memory, and reads from its log what the code costs. Errors carry the first
 * lines of the compiler's own message, because nobody can guess the rest. */
#include "compile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fail.h"

/* The number that ends right before `unit`, at `at`: "Used 40 registers". */
static long numberBefore(const char *log, const char *at) {
  const char *end = at;
  while (end > log && end[-1] == ' ') end--;
  const char *begin = end;
  while (begin > log && begin[-1] >= '0' && begin[-1] <= '9') begin--;
  return begin == end ? -1 : strtol(begin, NULL, 10);
}

static int largestBefore(const char *log, const char *unit) {
  long most = -1;
  for (const char *at = log; (at = strstr(at, unit)); at += strlen(unit)) {
    long n = numberBefore(log, at);
    if (n > most) most = n;
  }
  return (int)most;
}

epCompileUsage epCompileUsageOf(const char *log) {
  epCompileUsage usage;
  int stores = largestBefore(log, "bytes spill stores"), loads = largestBefore(log, "bytes spill loads");
  usage.registers = largestBefore(log, "registers");
  usage.spillBytes = stores > loads ? stores : loads;
  usage.localBytes = largestBefore(log, "bytes stack frame");
  usage.staticSmemBytes = largestBefore(log, "bytes smem");
  /* The assembler leaves out shared memory that is not there. */
  if (usage.staticSmemBytes < 0 && usage.registers >= 0) usage.staticSmemBytes = 0;
  return usage;
}

/* The log's first error, or its first line: what fits one line of ours. */
static void firstError(const char *log, char *line, size_t room) {
  const char *at = strstr(log, "error");
  if (!at) at = log;
  while (at > log && at[-1] != '\n') at--;
  size_t n = strcspn(at, "\n");
  snprintf(line, room, "%.*s", (int)n, at);
}

ncclResult_t epCompile(const epNvrtc *nvrtc, const epCompileJob *job, epCompiled *out) {
  ncclResult_t rc = ncclSuccess;
  int result, headers = 0;
  size_t bytes = 0;
  epNvrtcProgram program = NULL;
  const char **texts = NULL, **names = NULL;
  epCompiled made;
  memset(&made, 0, sizeof(made));

  for (int b = 0; b < EP_COMPILE_MAX_BUNDLES && job->bundles[b]; b++) headers += job->bundles[b]->count;
  texts = calloc((size_t)headers + 1, sizeof(*texts));
  names = calloc((size_t)headers + 1, sizeof(*names));
  if (!texts || !names) {
    rc = epFail(ncclSystemError, "out of memory: a list of %d embedded headers", headers);
    goto done;
  }
  headers = 0;
  for (int b = 0; b < EP_COMPILE_MAX_BUNDLES && job->bundles[b]; b++) {
    for (int i = 0; i < job->bundles[b]->count; i++, headers++) {
      names[headers] = job->bundles[b]->names[i];
      texts[headers] = job->bundles[b]->texts[i];
    }
  }

  char fileName[80];
  snprintf(fileName, sizeof(fileName), "%s.cu", job->name);
  result = nvrtc->createProgram(&program, job->source, fileName, headers, texts, names);
  if (result != EP_NVRTC_SUCCESS) {
    rc = epFail(ncclSystemError, "%s: NVRTC cannot create the program: %s", job->name, nvrtc->getErrorString(result));
    goto done;
  }
  result = nvrtc->compileProgram(program, job->optionCount, job->options);
  if (nvrtc->getProgramLogSize(program, &bytes) != EP_NVRTC_SUCCESS) bytes = 0;
  made.log = calloc(bytes + 1, 1);
  if (!made.log) {
    rc = epFail(ncclSystemError, "%s: out of memory: %zu bytes for the compiler's log", job->name, bytes);
    goto done;
  }
  if (bytes && nvrtc->getProgramLog(program, made.log) != EP_NVRTC_SUCCESS) made.log[0] = 0;
  if (result != EP_NVRTC_SUCCESS) {
    char line[512];
    firstError(made.log, line, sizeof(line));
    epLog(EP_LOG_INFO, "%s: NVRTC's log:\n%s", job->name, made.log);
    rc = epFail(ncclInternalError, "%s does not compile with %s by NVRTC %d.%d: %s: %s", job->name,
                job->optionCount ? job->options[0] : "", nvrtc->version / 1000, nvrtc->version % 1000 / 10,
                nvrtc->getErrorString(result), line);
    goto done;
  }
  made.usage = epCompileUsageOf(made.log);

  result = nvrtc->getCubinSize(program, &made.bytes);
  if (result != EP_NVRTC_SUCCESS || made.bytes == 0) {
    rc = epFail(ncclInternalError, "%s: NVRTC yields no machine code: %s", job->name, nvrtc->getErrorString(result));
    goto done;
  }
  made.cubin = malloc(made.bytes);
  if (!made.cubin) {
    rc = epFail(ncclSystemError, "%s: out of memory: %zu bytes of machine code", job->name, made.bytes);
    goto done;
  }
  result = nvrtc->getCubin(program, made.cubin);
  if (result != EP_NVRTC_SUCCESS) {
    rc = epFail(ncclInternalError, "%s: NVRTC yields no machine code: %s", job->name, nvrtc->getErrorString(result));
    goto done;
  }
  /* PTX is for people: without it the result is as good. */
  if (job->keepPtx && nvrtc->getPtxSize(program, &bytes) == EP_NVRTC_SUCCESS && bytes &&
      (made.ptx = calloc(bytes + 1, 1)) && nvrtc->getPtx(program, made.ptx) != EP_NVRTC_SUCCESS)
    made.ptx[0] = 0;

done:
  if (program) nvrtc->destroyProgram(&program);
  free(texts);
  free(names);
  if (rc == ncclSuccess)
    *out = made;
  else
    epCompiledFree(&made);
  return rc;
}

void epCompiledFree(epCompiled *compiled) {
  free(compiled->cubin);
  free(compiled->ptx);
  free(compiled->log);
  memset(compiled, 0, sizeof(*compiled));
}
