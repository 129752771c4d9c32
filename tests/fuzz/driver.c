/* Runs the fuzzed property where there is no libFuzzer: the files given (of a folder, all), then programs drawn from a seed for some
 * seconds; seed 0: the time.
 *   fuzz_host [-t SECONDS] [-s SEED] [-k FILE] [FILE ...]
 * FUZZ_TRACE in the environment: every call is told. FILE of -k always holds the program that runs, so that it is there after a crash; a program of more than 30 s is a hang. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fuzz.h"

#define BYTES 1000u
#define HANG_SECONDS 30u

static void fuzzDrive(const char *keep, const uint8_t *data, size_t size) {
  if (keep) {
    FILE *file = fopen(keep, "wb");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file)) fuzzFail(NULL, "cannot write %s", keep);
  }
  alarm(HANG_SECONDS);
  uint8_t *copy = malloc(size ? size : 1); /* the end of the bytes is the end of a block */
  if (!copy) fuzzFail(NULL, "out of memory");
  memcpy(copy, data, size);
  LLVMFuzzerTestOneInput(copy, size);
  free(copy);
  alarm(0);
}

static unsigned fuzzFile(const char *keep, const char *path) {
  static uint8_t data[1 << 16];
  FILE *file = fopen(path, "rb");
  if (!file) fuzzFail(NULL, "cannot read %s", path);
  const size_t size = fread(data, 1, sizeof data, file);
  fclose(file);
  fuzzDrive(keep, data, size);
  return 1;
}

int main(int argc, char **argv) {
  static uint8_t data[BYTES];
  const char *keep = NULL;
  uint64_t state = 1;
  unsigned seconds = 0, runs = 0;
  int option;
  while ((option = getopt(argc, argv, "t:s:k:")) != -1) {
    if (option == 't') seconds = (unsigned)strtoul(optarg, NULL, 10);
    if (option == 's') state = strtoull(optarg, NULL, 10);
    if (option == 'k') keep = optarg;
    if (option == '?') return 2;
  }
  if (!state) state = (uint64_t)time(NULL);
  for (int i = optind; i < argc; i++) {
    struct dirent **names = NULL;
    const int n = scandir(argv[i], &names, NULL, alphasort);
    char path[4096];
    if (n < 0) runs += fuzzFile(keep, argv[i]);
    for (int j = 0; j < n; j++) {
      snprintf(path, sizeof path, "%s/%s", argv[i], names[j]->d_name);
      if (names[j]->d_name[0] != '.') runs += fuzzFile(keep, path);
      free(names[j]);
    }
    free(names);
  }
  for (const time_t end = time(NULL) + seconds; time(NULL) < end; runs++) {
    for (size_t i = 0; i < BYTES; i++) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      data[i] = (uint8_t)(state >> 56);
    }
    fuzzDrive(keep, data, 42 + (data[2] * 256u + data[3]) % (BYTES - 42));
  }
  printf("%u programs\n", runs);
  return 0;
}
