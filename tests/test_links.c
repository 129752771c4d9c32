/* What groups of several scale-up domains take by the rates of their links: the sums against counting, the plans, and how the
 * rates are found in a sysfs that the test builds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "hybrid.h"
#include "links.h"
#include "links_find.h"

static void near(double got, double want, double share) {
  if (got < want * (1 - share) || got > want * (1 + share)) fail_msg("%g instead of %g", got, want);
}

/* All pairs of distinct experts of 2 x 3 ranks with two experts each, counted. */
static void rowsAreAverages(void **state) {
  enum { O = 2, U = 3, R = O * U, E = 12, MINE = 1 };
  (void)state;
  unsigned pairs = 0, domains = 0, ranks = 0, sent = 0, nvlink = 0;
  for (unsigned a = 0; a < E; a++)
    for (unsigned b = 0; b < E; b++) {
      unsigned owner[2] = {a / (E / R), b / (E / R)}, distinct = owner[0] == owner[1] ? 1 : 2, far = 0;
      if (a == b) continue;
      pairs++;
      ranks += distinct;
      for (unsigned i = 0; i < distinct; i++) {
        far |= owner[i] / U != MINE / U;
        sent += owner[i] / U == MINE / U && owner[i] != MINE;
        nvlink += owner[i] % U != MINE % U; /* also by the rail's rank, which does so for me as I for it */
      }
      domains += far;
      sent += far;
    }
  epLinkRows r = epLinkRowsOf(O, U, E, 2);
  near(r.domains, (double)domains / pairs, 1e-9);
  near(r.ranks, (double)ranks / pairs, 1e-9);
  near(r.sent, (double)sent / pairs, 1e-9);
  near(r.nvlink, (double)nvlink / pairs, 1e-9);
  r = epLinkRowsOf(1, 8, 256, 8); /* one domain: nothing leaves it */
  assert_true(r.domains == 0 && r.nvlink < r.ranks && r.sent == r.nvlink);
}

static void plansFollowTheLinks(void **state) {
  (void)state;
  epLinks h100 = {450, 50}, slowNvlink = {100, 50}, twice = {900, 100}, none = {450, 0};
  epLinkPlan two = epLinkPlanOf(&h100, 2, 8, 256, 8, 7168, 8), four = epLinkPlanOf(&h100, 4, 8, 256, 8, 7168, 8);
  assert_true(two.nicBound && four.nicBound);
  /* The scale-out link takes 2.7 rows a token instead of one: everything else has 2.7 times as long. */
  assert_in_range(two.sendBlocks, 9, 12);
  assert_in_range(two.sms, 30, 38);
  assert_true(two.sms >= two.sendBlocks + two.pushBlocks + two.reduceBlocks);
  assert_in_range(four.sendBlocks, 2, 4);
  assert_in_range(four.sms, 10, 15);
  /* The smaller the share of a peer, the fewer queue pairs to each. */
  assert_true(two.contexts > four.contexts && epLinkPlanOf(&h100, 128, 8, 1024, 8, 7168, 8).contexts == 1);
  assert_int_equal(epLinkPlanOf(&h100, 2, 8, 256, 8, 14336, 8).contexts, (two.contexts + 1) / 2);
  assert_false(epLinkPlanOf(&slowNvlink, 2, 8, 256, 8, 7168, 8).nicBound);
  assert_true(epLinkPlanOf(&twice, 2, 8, 256, 8, 7168, 8).sms > two.sms);
  /* No guess where a rate is not known; a domain of one rank has no NVLink to know. */
  assert_int_equal(epLinkPlanOf(&none, 2, 8, 256, 8, 7168, 8).sms, 0);
  none = (epLinks){0, 50};
  assert_int_equal(epLinkPlanOf(&none, 2, 8, 256, 8, 7168, 8).sms, 0);
  assert_true(epLinkPlanOf(&none, 2, 1, 256, 8, 7168, 8).sms > 0);
  assert_int_equal(epLinkPlanOf(&h100, 1, 8, 256, 8, 7168, 8).sms, 0);
}

/* ---- On a group ------------------------------------------------------------------------------------------------- */

static const epTopology cluster = {.ranks = 16,
                                   .scaleUpRanks = 8,
                                   .scaleOutRanks = 2,
                                   .arch = 90,
                                   .numSms = 132,
                                   .smemPerBlock = 232448,
                                   .pci = {0x7fff, 0xff, 31}};
static const epShape shape = {
    .ranks = 16, .experts = 256, .topk = 8, .maxTokens = 64, .stageRows = 64, .maxRowBytes = 14336};

static void sizesFollowTheLinks(void **state) {
  (void)state;
  ncclEpBufferSize_t plain, fitted;
  epHybridBufferSize(&cluster, &shape, 0, &plain);
  assert_int_equal(plain.gin_contexts, 4);
  assert_int_equal(plain.gin_signals, epSignalCount(2, 64));
  assert_int_equal(setenv("NCCL_EP_NVLINK_GBS", "450", 1) | setenv("NCCL_EP_NIC_GBS", "50", 1), 0);
  epHybridBufferSize(&cluster, &shape, 0, &fitted);
  epLinks h100 = {450, 50};
  epLinkPlan plan = epLinkPlanOf(&h100, 2, 8, 256, 8, 7168, 8);
  assert_int_equal(fitted.gin_contexts, plan.contexts);
  assert_int_equal(fitted.queue_pairs, plan.contexts);
  assert_int_equal(fitted.gin_signals, epSignalCount(2, plan.sendBlocks * 8));
  assert_int_equal(setenv("NCCL_EP_NUM_QPS", "3", 1), 0);
  epHybridBufferSize(&cluster, &shape, 0, &fitted);
  assert_int_equal(fitted.gin_contexts, 3);
  assert_int_equal(setenv("NCCL_EP_NUM_QPS", "100000", 1), 0); /* no more than channels */
  epHybridBufferSize(&cluster, &shape, 0, &fitted);
  assert_int_equal(fitted.gin_contexts, plan.sendBlocks * 8);
  assert_int_equal(unsetenv("NCCL_EP_NVLINK_GBS") | unsetenv("NCCL_EP_NIC_GBS") | unsetenv("NCCL_EP_NUM_QPS"), 0);
}

static void launchesFollowTheLinks(void **state) {
  (void)state;
  epTopology t = cluster;
  epConfig c = {.ranks = 16, .experts = 256, .topk = 8, .rowBytes = 14336};
  epGrid grid;
  t.plan = (epLinkPlan){.sendBlocks = 6, .pushBlocks = 9, .reduceBlocks = 3, .sms = 18, .contexts = 7, .nicBound = 1};
  assert_int_equal(epPolicyHybridMove(&t, 16, EP_KERNEL_DISPATCH, &c, &grid), ncclSuccess);
  assert_int_equal(grid.blocks, 16);
  assert_int_equal(grid.pushBlocks, 6);
  assert_int_equal(epPolicyHybridMove(&t, 18, EP_KERNEL_COMBINE, &c, &grid), ncclSuccess);
  assert_int_equal(grid.pushBlocks, 9);
  assert_int_equal(epPolicyHybridMove(&t, 4, EP_KERNEL_COMBINE, &c, &grid), ncclSuccess);
  assert_int_equal(grid.blocks, 8); /* all roles have a block */
  assert_int_equal(grid.pushBlocks, 1);
}

/* ---- Finding ---------------------------------------------------------------------------------------------------- */

static char root[64];

static void writeFile(const char *path, const char *text) {
  char full[512];
  snprintf(full, sizeof full, "%s/%s", root, path);
  for (char *slash = full + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
    *slash = 0;
    (void)mkdir(full, 0700);
    *slash = '/';
  }
  FILE *f = fopen(full, "w");
  if (!f) fail_msg("cannot write %s", full);
  fputs(text, f);
  fclose(f);
}

static void linkTo(const char *path, const char *target) {
  char full[512], to[512];
  snprintf(full, sizeof full, "%s/%s", root, path);
  snprintf(to, sizeof to, "%s/%s", root, target);
  assert_int_equal(symlink(to, full), 0);
}

static void gpu(const char *where, const char *address) {
  char path[320], target[256];
  snprintf(target, sizeof target, "devices/%s/%s", where, address);
  snprintf(path, sizeof path, "%s/vendor", target);
  writeFile(path, "0x10de\n");
  snprintf(path, sizeof path, "%s/class", target);
  writeFile(path, "0x030200\n");
  snprintf(path, sizeof path, "bus/pci/devices/%s", address);
  linkTo(path, target);
}

static void nic(const char *where, const char *name, const char *state, const char *rate) {
  char path[320], target[256];
  snprintf(path, sizeof path, "class/infiniband/%s/ports/1/state", name);
  writeFile(path, state);
  snprintf(path, sizeof path, "class/infiniband/%s/ports/1/rate", name);
  writeFile(path, rate);
  snprintf(target, sizeof target, "devices/%s/0000:aa:00.0-%s", where, name);
  snprintf(path, sizeof path, "%s/vendor", target);
  writeFile(path, "0x15b3\n");
  snprintf(path, sizeof path, "class/infiniband/%s/device", name);
  linkTo(path, target);
}

static double rateOf(int bus, const char *wantName) {
  char name[32];
  epPciAddress address = {0, bus, 0};
  double rate = epNicRate(root, &address, name, sizeof name);
  assert_string_equal(name, wantName);
  return rate;
}

static void nearestNicIsFound(void **state) {
  (void)state;
  char remove[128];
  snprintf(root, sizeof root, "/tmp/nccl_ep_links.XXXXXX");
  assert_non_null(mkdtemp(root));
  writeFile("bus/pci/devices/none", "");
  /* Two GPUs with a NIC each behind one switch port; two GPUs that share one; one that sees only what is far. */
  gpu("pci0000:00/sw0/p0", "0000:01:00.0"), nic("pci0000:00/sw0/p0", "mlx5_0", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n");
  gpu("pci0000:00/sw0/p1", "0000:02:00.0"), nic("pci0000:00/sw0/p1", "mlx5_1", "4: ACTIVE\n", "200 Gb/sec (2X NDR)\n");
  gpu("pci0000:40/sw1", "0000:41:00.0"), gpu("pci0000:40/sw1", "0000:42:00.0");
  nic("pci0000:40/sw1", "mlx5_2", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n");
  nic("pci0000:40/sw1", "mlx5_3", "1: DOWN\n", "400 Gb/sec (4X NDR)\n");
  near(rateOf(1, "mlx5_0"), 50, 1e-9);
  near(rateOf(2, "mlx5_1"), 25, 1e-9);
  near(rateOf(0x41, "mlx5_2"), 25, 1e-9);
  /* Two NICs for one GPU: it is counted as one's. */
  nic("pci0000:00/sw0/p0", "mlx5_4", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n");
  assert_true(epNicRate(root, &(epPciAddress){0, 1, 0}, remove, sizeof remove) == 50);
  assert_true(epNicRate(root, &(epPciAddress){0, 0x77, 0}, remove, sizeof remove) == 0); /* no such GPU */
  snprintf(remove, sizeof remove, "rm -r %s", root);
  assert_int_equal(system(remove), 0);
}

/* By the NVML in tests/nvml, which tells 26 GB/s a link. */
static void nvlinksAreAdded(void **state) {
  (void)state;
  char from[160];
  epLinks links = epLinksFind(&(epPciAddress){0, 1, 0}, from, sizeof from);
  near(links.nvlinkGbs, 16 * 26 + 25, 1e-9); /* one is down; one has its generation's speed */
  assert_non_null(strstr(from, "17 NVLinks, 441 GB/s"));
  links = epLinksFind(&(epPciAddress){0, 2, 0}, from, sizeof from);
  assert_true(links.nvlinkGbs == 0);
  assert_non_null(strstr(from, "0 NVLinks"));
}

static void settingsComeFirst(void **state) {
  (void)state;
  char from[160];
  assert_int_equal(setenv("NCCL_EP_NVLINK_GBS", "450", 1) | setenv("NCCL_EP_NIC_GBS", "25", 1), 0);
  epLinks links = epLinksFind(NULL, from, sizeof from);
  assert_true(links.nvlinkGbs == 450 && links.nicGbs == 25);
  assert_non_null(strstr(from, "NCCL_EP_NIC_GBS 25"));
  assert_int_equal(unsetenv("NCCL_EP_NVLINK_GBS") | unsetenv("NCCL_EP_NIC_GBS"), 0);
  links = epLinksFind(NULL, from, sizeof from);
  assert_true(links.nvlinkGbs == 0 && links.nicGbs == 0);
  assert_non_null(strstr(from, "unknown"));
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(rowsAreAverages),     cmocka_unit_test(plansFollowTheLinks),
                                     cmocka_unit_test(sizesFollowTheLinks), cmocka_unit_test(launchesFollowTheLinks),
                                     cmocka_unit_test(nearestNicIsFound),   cmocka_unit_test(nvlinksAreAdded),
                                     cmocka_unit_test(settingsComeFirst)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
