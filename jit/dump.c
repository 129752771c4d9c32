/* NCCL_EP_JIT_DUMP. Files are named after kernel, target and configuration, so that two runs can be compared; the
 * headers lie beside the sources, so that `nvcc -I.` compiles a dumped source as it is. */
#include "dump.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fail.h"

extern char **environ;

static void writeFile(const char *path, const void *data, size_t bytes) {
  FILE *f = fopen(path, "wb");
  if (!f) {
    epLog(EP_LOG_WARN, "NCCL_EP_JIT_DUMP: %s: %s", path, strerror(errno));
    return;
  }
  size_t n = fwrite(data, 1, bytes, f);
  if (fclose(f) != 0 || n != bytes) epLog(EP_LOG_WARN, "NCCL_EP_JIT_DUMP: %s: %s", path, strerror(errno));
}

static int run(const char *program, char *const argv[], const char *output) {
  pid_t pid;
  int status = -1;
  posix_spawn_file_actions_t actions;
  if (posix_spawn_file_actions_init(&actions) != 0) return 0;
  if (posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output, O_WRONLY | O_CREAT | O_TRUNC, 0644) == 0 &&
      posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0) == 0 &&
      posix_spawnp(&pid, program, &actions, NULL, argv, environ) == 0) {
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
  }
  posix_spawn_file_actions_destroy(&actions);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void disassemble(const char *cubin, const char *output) {
  static const struct { const char *program, *option; } tools[] = {{"nvdisasm", "-c"}, {"cuobjdump", "-sass"}};
  const char *cuda = getenv("CUDA_HOME");
  for (int place = 0; place < 2; place++) {
    for (size_t i = 0; i < sizeof(tools) / sizeof(tools[0]); i++) {
      char path[600];
      if (place == 0)
        snprintf(path, sizeof(path), "%s", tools[i].program);
      else
        snprintf(path, sizeof(path), "%s/bin/%s", cuda && *cuda ? cuda : "/usr/local/cuda", tools[i].program);
      char *argv[] = {path, (char *)(size_t)tools[i].option, (char *)(size_t)cubin, NULL};
      if (run(path, argv, output)) return;
    }
  }
  (void)unlink(output); /* neither tool is there: leave no empty file */
}

void epJitDump(const char *folder, const char *label, const epConfig *config, const epCompileJob *job,
               const epCompiled *compiled) {
  char path[1200], stem[1024];
  if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
    epLog(EP_LOG_WARN, "NCCL_EP_JIT_DUMP: %s: %s", folder, strerror(errno));
    return;
  }
  snprintf(stem, sizeof(stem), "%s/%s-r%u-e%u-k%u-b%u-d%u-l%u-w%u-i%u-t%u", folder, label, config->ranks,
           config->experts, config->topk, config->rowBytes, config->dtype, config->layout, config->weights,
           config->indexBytes, config->threads);
  snprintf(path, sizeof(path), "%s.cu", stem);
  writeFile(path, job->source, strlen(job->source));
  for (int b = 0; b < EP_COMPILE_MAX_BUNDLES && job->bundles[b]; b++) {
    for (int i = 0; i < job->bundles[b]->count; i++) {
      snprintf(path, sizeof(path), "%s/%s", folder, job->bundles[b]->names[i]);
      writeFile(path, job->bundles[b]->texts[i], strlen(job->bundles[b]->texts[i]));
    }
  }
  if (!compiled) return;
  snprintf(path, sizeof(path), "%s.log", stem);
  writeFile(path, compiled->log, strlen(compiled->log));
  if (compiled->ptx) {
    snprintf(path, sizeof(path), "%s.ptx", stem);
    writeFile(path, compiled->ptx, strlen(compiled->ptx));
  }
  snprintf(path, sizeof(path), "%s.cubin", stem);
  writeFile(path, compiled->cubin, compiled->bytes);
  char assembly[1200];
  snprintf(assembly, sizeof(assembly), "%s.sass", stem);
  disassemble(path, assembly);
}
