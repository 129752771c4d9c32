/* Which stream a call's work goes to, what it waits for and what is recorded behind it; and the order of a group's calls on
 * different streams, once the group has a stream of its own. */
#ifndef EP_HOST_STREAMS_H_
#define EP_HOST_STREAMS_H_

#include "runtime.h"

/* How a call wants its work run. */
typedef struct epIssue {
  int sendOnly;
  cudaEvent_t start, epilogue, done;
  int communication; /* on the group's own stream */
  cudaStream_t work; /* OUT of epStreamsBegin */
} epIssue;

/* `config`: the struct's name in messages. */
ncclResult_t epIssueCheck(const char *call, const char *config, const epIssue *how);
/* The group's own stream, made at first use. */
ncclResult_t epCommunicationStream(struct ncclEpGroup *group, cudaStream_t *stream);
/* Sets how->work and makes it wait for what it has to; the caller's work is launched on it then, and epStreamsEnd follows. */
ncclResult_t epStreamsBegin(struct ncclEpGroup *group, epIssue *how, cudaStream_t stream);
ncclResult_t epStreamsEnd(struct ncclEpGroup *group, const epIssue *how);
/* Both, for a call that launches nothing: later ones wait for what its stream holds. */
ncclResult_t epStreamsMark(struct ncclEpGroup *group, cudaStream_t stream);
/* Makes how->work wait for what `before` was given so far: between the parts of an operation in one graph. */
ncclResult_t epStreamsJoin(struct ncclEpGroup *group, const epIssue *how, cudaStream_t before);
ncclResult_t epStreamsRelease(struct ncclEpGroup *group);

#endif
