/* The environment table and its readers. */
#include "env.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fail.h"

enum { EP_ENV_KIND_STRING, EP_ENV_KIND_NUMBER };
static const struct {
  const char *name;
  int kind;
  const char *fallback;
  const char *doc;
} epEnvTable[EP_ENV_COUNT] = {
#define X(id, name, kind, value, doc) {name, EP_ENV_KIND_##kind, value, doc},
    EP_ENV_TABLE(X)
#undef X
};

const char *epEnvName(epEnvId id) { return epEnvTable[id].name; }

const char *epEnvString(epEnvId id) {
  const char *text = getenv(epEnvTable[id].name);
  if (text) return text;
  return epEnvTable[id].fallback[0] ? epEnvTable[id].fallback : NULL;
}

int epEnvNumber(epEnvId id, uint64_t lowest, uint64_t highest, uint64_t *value) {
  const char *text = epEnvString(id);
  char *end;
  unsigned long long number;
  if (!text || !text[0]) return 0;
  errno = 0;
  number = strtoull(text, &end, 10);
  if (errno || *end || strchr(text, '-') || number < lowest || number > highest) {
    epLog(EP_LOG_WARN, "%s=%s ignored: expected a number from %llu to %llu", epEnvTable[id].name, text,
          (unsigned long long)lowest, (unsigned long long)highest);
    return 0;
  }
  *value = number;
  return 1;
}

void epEnvPrint(FILE *out) {
  for (int i = 0; i < EP_ENV_COUNT; i++)
    fprintf(out, "%-24s %-6s %-8s %s\n", epEnvTable[i].name,
            epEnvTable[i].kind == EP_ENV_KIND_NUMBER ? "number" : "text",
            epEnvTable[i].fallback[0] ? epEnvTable[i].fallback : "-", epEnvTable[i].doc);
}
