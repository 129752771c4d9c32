/* Streams and events of a group's calls. */
#include "streams.h"

#include "fail.h"

ncclResult_t epIssueCheck(const char *call, const char *config, const epIssue *how) {
  if (how->communication != 0 && how->communication != 1)
    return epFail(ncclInvalidArgument, "%s: %s.communication_stream is %d: expected 0 or 1", call, config,
                  how->communication);
  if (how->epilogue && how->sendOnly)
    return epFail(ncclInvalidArgument,
                  "%s: %s.epilogue_event is given with send_only: expected it as start_event of ncclEpCompleteExt",
                  call, config);
  if (how->communication && !how->done && !how->sendOnly)
    return epFail(
        ncclInvalidArgument,
        "%s: %s.done_event is NULL: expected an event with communication_stream, as `stream` does not wait for "
        "the work",
        call, config);
  return ncclSuccess;
}

ncclResult_t epCommunicationStream(struct ncclEpGroup *g, cudaStream_t *stream) {
  const epBackendOps *ops = g->be->ops;
  epStreams *s = &g->streams;
  ncclResult_t r = ncclSuccess;
  if (!s->fork) r = ops->eventCreate(g->be, &s->fork);
  if (r == ncclSuccess && !s->last) r = ops->eventCreate(g->be, &s->last);
  if (r == ncclSuccess && !s->own) r = ops->streamCreate(g->be, &s->own);
  if (r == ncclSuccess) *stream = s->own;
  return r;
}

/* `to` waits for all that `from` holds now. */
static ncclResult_t joinStreams(struct ncclEpGroup *g, cudaStream_t from, cudaStream_t to) {
  ncclResult_t r = g->be->ops->eventRecord(g->be, g->streams.fork, from);
  return r == ncclSuccess ? g->be->ops->streamWait(g->be, to, g->streams.fork) : r;
}

ncclResult_t epStreamsBegin(struct ncclEpGroup *g, epIssue *how, cudaStream_t stream) {
  const epBackendOps *ops = g->be->ops;
  epStreams *s = &g->streams;
  ncclResult_t r = ncclSuccess;
  how->work = stream;
  if (how->communication) r = epCommunicationStream(g, &how->work);
  if (r == ncclSuccess && how->start) r = ops->streamWait(g->be, how->work, how->start);
  if (!s->own || r != ncclSuccess) return r;
  if (how->communication && !how->start) r = joinStreams(g, stream, how->work);
  if (r == ncclSuccess) r = ops->isCapturing(g->be, stream, &s->capturing);
  if (r == ncclSuccess && !s->capturing && s->recorded && s->lastStream != how->work)
    r = ops->streamWait(g->be, how->work, s->last);
  return r;
}

ncclResult_t epStreamsEnd(struct ncclEpGroup *g, const epIssue *how) {
  const epBackendOps *ops = g->be->ops;
  epStreams *s = &g->streams;
  ncclResult_t r = how->done ? ops->eventRecord(g->be, how->done, how->work) : ncclSuccess;
  if (!s->own || s->capturing || r != ncclSuccess) return r; /* a graph's events order nothing outside of it */
  r = ops->eventRecord(g->be, s->last, how->work);
  s->lastStream = how->work;
  s->recorded = r == ncclSuccess;
  return r;
}

ncclResult_t epStreamsMark(struct ncclEpGroup *g, cudaStream_t stream) {
  epIssue how = {0};
  ncclResult_t r = epStreamsBegin(g, &how, stream);
  return r == ncclSuccess ? epStreamsEnd(g, &how) : r;
}

ncclResult_t epStreamsJoin(struct ncclEpGroup *g, const epIssue *how, cudaStream_t before) {
  return g->streams.own && g->streams.capturing && before != how->work ? joinStreams(g, before, how->work)
                                                                       : ncclSuccess;
}

ncclResult_t epStreamsRelease(struct ncclEpGroup *g) {
  const epBackendOps *ops = g->be->ops;
  epStreams *s = &g->streams;
  ncclResult_t first = s->own ? ops->streamDestroy(g->be, s->own) : ncclSuccess;
  cudaEvent_t events[] = {s->fork, s->last};
  for (int i = 0; i < 2; i++) {
    ncclResult_t r = events[i] ? ops->eventDestroy(g->be, events[i]) : ncclSuccess;
    first = first == ncclSuccess ? r : first;
  }
  *s = (epStreams){0};
  return first;
}
