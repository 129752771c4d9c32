/* Says what the library finds on this machine, what it would choose, and for each thing missing what that means.
 * Changes nothing, needs nothing, and exits 0 whatever it finds. */
#include <argp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emu.h"
#include "env.h"
#include "fail.h"
#include "info.h"
#include "nccl_ep.h"

const char *argp_program_version = "ep_info 0.1.0";
static const char doc[] =
    "Show what NCCL EP finds on this machine: GPUs, links, NCCL, NVRTC, NICs, the emulated fabric.";
static const struct argp_option options[] = {{"environment", 'e', NULL, 0, "also list the environment variables", 0},
                                             {0}};

static error_t parse(int key, char *arg, struct argp_state *state) {
  int *environment = state->input;
  switch (key) {
  case 'e':
    *environment = 1;
    return 0;
  case ARGP_KEY_ARG:
    argp_error(state, "unexpected argument '%s'", arg);
    return 0;
  default:
    return ARGP_ERR_UNKNOWN;
  }
}

void infoSection(const char *title) { printf("\n%s\n", title); }

void infoFound(const char *name, const char *format, ...) {
  va_list args;
  printf("   %-18s ", name);
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  printf("\n");
}

void infoMissing(const char *name, const char *reason, const char *meaning) {
  printf("-- %-18s missing (%s): %s\n", name, reason, meaning);
}

static void emulator(void) {
  const epEmuModule *module;
  infoSection("Emulated fabric");
  if (epEmuLoad(&module) == ncclSuccess)
    infoFound("module", "libnccl_ep_emu.so, version %u", module->version);
  else
    infoMissing("module", epLastError(), "no emulated communicators; real ones are not affected");
}

int main(int argc, char **argv) {
  const struct argp argp = {options, parse, NULL, doc, NULL, NULL, NULL};
  int environment = 0;
  if (argp_parse(&argp, argc, argv, 0, NULL, &environment) != 0) return 2;
  /* What is missing is told here, in one line each, not by the log as well. */
  (void)setenv("NCCL_EP_DEBUG", "NONE", 0);
  printf("NCCL EP %d.%d.%d, API version %d\n", NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH, NCCL_EP_API_VERSION);
  infoGpus();
  infoNvlink();
  infoNccl();
  infoJit();
  infoNics();
  infoSums();
  emulator();
  if (environment) {
    infoSection("Environment");
    epEnvPrint(stdout);
  }
  return 0;
}
