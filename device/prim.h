/* The primitives that kernels are written in, and nothing else. Two implementations with the same names and meaning:
 * PTX (prim_ptx.h) and the emulated GPU (emu/prim_host.h). Kernels include this file and never name either.
 *
 *   namespace p
 *   who        tid() bid() lane() warp()
 *   bits       popc(u32) ffs(u32)                        ffs: 1-based, 0 when none
 *   warp       shfl shfl_xor shfl_up(mask, u32, n)  ballot(mask, bool) match_any(mask, u32)  sync_warp(mask = FULL)
 *              shfl, ballot and match give no memory ordering; sync_warp does
 *   block      sync_threads()  bar_sync(id, n)  bar_arrive(id, n)
 *   shared     smem_base() -> u32 handle; lds<T>(u32) sts<T>(u32, T) for T of 4, 8, 16 bytes (u32, u64, uint4)
 *              sadd(u32, v)  atomic on a u32; orders nothing
 *   mbarrier   mbar_init(a, n) fence_mbar_init() mbar_arrive(a) mbar_expect_tx(a, bytes) mbar_wait(a, parity)
 *   bulk       bulk_g2s(smem, global, bytes, mbar)  bulk_s2g(global, smem, bytes)  bulk_commit()
 *              bulk_wait<N>() complete and visible; bulk_wait_read<N>() only the source may be reused
 *   proxies    fence_proxy_async()         generic -> async, shared memory
 *              fence_proxy_async_global()  generic -> async, all state spaces: after an acquire, before a bulk copy
 *                                          touches what it covers
 *   global     ldg<T>(p) stg<T>(p, T)  weak; T: u32 int32_t u64 int64_t float uint4
 *              ldg_any<T>(p)  as ldg, of memory that may hold nothing yet: the value is not used before
 *              confirm(p, bytes) has said that it holds something (no code on GPUs)
 *              ld_acquire_sys/ld_relaxed_sys(u32* or u64*)  st_release_sys/st_relaxed_sys  fence_sys()
 *              look_sys(u32*)  fence_sys, then ld_acquire_sys: news that it does not see come after all that was loaded before it
 *              ld_relaxed_sys128(p) -> uint4, st_relaxed_sys128(p, uint4): 16 bytes at once, as one 128-bit scalar
 *              ld_acquire_gpu(u32*)  st_release_gpu(u32*, v)  atomic_add(u32*, v) relaxed gpu   atomic_add_acq_rel_gpu(u32*, v)
 *              atomic_cas(u32*, expect, v) relaxed sys
 *   grid       grid_wait()    the kernels before this one on the stream are done and visible; comes first in every kernel
 *              grid_launch()  the next kernel's blocks may take their places and wait there; orders no memory
 *   time       nanosleep(ns) globaltimer()
 *   network    in gin.h, which only kernels of several scale-up domains include
 *   numbers    bf16_lo/bf16_hi(u32) -> float, f16_lo/f16_hi(u32) -> float, pack_bf16(lo, hi), pack_f16(lo, hi): round to
 *              nearest even; fadd(a, b), fma(a, b, c): one rounding each; as_float(u32) as_u32(float)
 */
#ifndef EP_DEVICE_PRIM_H_
#define EP_DEVICE_PRIM_H_

#ifdef EP_EMU
#include "prim_host.h"
#else
#include "prim_ptx.h"
#endif

#endif
