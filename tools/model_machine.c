/* A machine's figures from a file. Every figure is required unless it says that something is not there: a model that
 * fills in its own would be a guess. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "failure.h"
#include "model.h"

typedef struct reader {
  const char *path;
  json_t *root;
  int failed;
} reader;

/* root.part.key, from low to high. */
static double figure(reader *r, const char *part, const char *key, double low, double high) {
  json_t *value = json_object_get(json_object_get(r->root, part), key);
  double x = json_is_number(value) ? json_number_value(value) : NAN;
  if (x >= low && x <= high) return x;
  if (!r->failed)
    epToolFail("--model %s: %s.%s: expected a number from %g to %g%s", r->path, part, key, low, high,
               value ? "" : ", and it is missing");
  r->failed = 1;
  return low;
}

/* A share goes with its rate: a rate alone is what a data sheet promises. */
static void rate(reader *r, const char *part, double *gbs, double *share) {
  *gbs = figure(r, part, "gbs", 0.001, 1e6);
  *share = figure(r, part, "share", 0.01, 1);
}

int epModelRead(const char *path, epModelMachine *m) {
  static const char *const parts[] = {"name", "gpu", "nvlink", "nic", "pcie", "hbm", "update", "sources", NULL};
  json_error_t error;
  reader r = {path, json_load_file(path, JSON_REJECT_DUPLICATES, &error), 0};
  const char *name, *key;
  json_t *value;
  memset(m, 0, sizeof(*m));
  if (!r.root) return epToolFail("--model %s: line %d: %s", path, error.line, error.text);
  json_object_foreach(r.root, key, value) {
    int i = 0;
    while (parts[i] && strcmp(parts[i], key) != 0) i++;
    if (!parts[i]) {
      epToolFail("--model %s: %s: not a part of a machine: expected name, gpu, nvlink, nic, pcie, hbm, update, sources",
                 path, key);
      r.failed = 1;
    }
  }
  name = json_string_value(json_object_get(r.root, "name"));
  snprintf(m->name, sizeof(m->name), "%s", name ? name : path);
  m->sms = (unsigned)figure(&r, "gpu", "sms", 1, 4096);
  m->smGbs = figure(&r, "gpu", "sm_store_gbs", 0.1, 1e4);
  m->launchUs = figure(&r, "gpu", "launch_us", 0, 1e6);
  rate(&r, "nvlink", &m->nvlinkGbs, &m->nvlinkShare);
  m->nvlinkUs = figure(&r, "nvlink", "latency_us", 0, 1e6);
  if (json_object_get(r.root, "nic")) {
    rate(&r, "nic", &m->nicGbs, &m->nicShare);
    m->nicUs = figure(&r, "nic", "latency_us", 0, 1e6);
  }
  if (json_object_get(r.root, "pcie")) rate(&r, "pcie", &m->pcieGbs, &m->pcieShare);
  rate(&r, "hbm", &m->hbmGbs, &m->hbmShare);
  m->hbmGb = figure(&r, "hbm", "gb", 0.1, 1e5);
  m->updateUs = figure(&r, "update", "us", 0, 1e6);
  m->updateTokenNs = figure(&r, "update", "token_ns", 0, 1e6);
  json_decref(r.root);
  return r.failed ? -1 : 0;
}
