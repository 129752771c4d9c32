/* The emulator's module: loaded by the first ncclEpEmu* call, forwarded to afterwards. */
#ifndef EP_HOST_EMU_H_
#define EP_HOST_EMU_H_

#include "backend.h"

/* Loads the module on the first call. Never unloaded: its communicators hold pointers into it. */
ncclResult_t epEmuLoad(const epEmuModule **module);
/* The module when it is loaded, else NULL. */
const epEmuModule *epEmuLoaded(void);

#endif
