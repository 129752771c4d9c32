/* Writes what the JIT made into a folder, for people: source, headers, compiler's log, PTX, machine code, assembly. */
#ifndef EP_JIT_DUMP_H_
#define EP_JIT_DUMP_H_

#include "abi.h"
#include "compile.h"

/* `compiled` NULL: compiling failed, only the source is written. Trouble is logged and otherwise ignored. */
void epJitDump(const char *folder, const char *label, const epConfig *config, const epCompileJob *job,
               const epCompiled *compiled);

#endif
