// The library's kernels compiled for the emulated GPU, found by the identifiers of device/abi.h.
#pragma once
#include <functional>
#include <string>

#include "abi.h"

namespace emu {

// A kernel with its configuration and arguments bound, to be run by every thread of a launch; empty when the
// identifier or the size of the arguments is wrong. The arguments are copied.
std::function<void()> kernelBody(int kernelId, const epConfig &config, const void *args, size_t argBytes);
const char *kernelName(int kernelId);

} // namespace emu
