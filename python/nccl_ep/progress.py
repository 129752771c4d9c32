"""What the host knows to be over on a rank's emulated streams, whose events cannot be asked."""


class Progress:
    """Times of a stream are counted at each recorded event and each wait of the host. A point is what must be over, as
    {stream: time}; what a stream has waited for is part of its own points."""

    def __init__(self):
        self._time = {}      # stream -> its last time
        self._busy = set()   # streams on which something is queued since
        self._before = {}    # stream -> the point of its last time
        self._over = {}

    @staticmethod
    def _key(stream):
        return getattr(stream, 'value', stream)

    @staticmethod
    def _merge(into, point):
        for stream, time in point.items():
            into[stream] = max(into.get(stream, 0), time)

    def queue(self, stream):
        """Something is queued on a stream."""
        self._busy.add(self._key(stream))

    def record(self, stream):
        """A new time of a stream. Returns its point."""
        stream = self._key(stream)
        self._busy.discard(stream)
        self._time[stream] = self._time.get(stream, 0) + 1
        before = self._before.setdefault(stream, {})
        before[stream] = self._time[stream]
        return dict(before)

    def order(self, stream, point):
        """What is queued on a stream from here on comes after the point."""
        self.queue(stream)
        self._merge(self._before.setdefault(self._key(stream), {}), point)

    def start(self, stream):
        """The point that is over when anything queued on the stream from here on runs."""
        return dict(self._before.get(self._key(stream), {}))

    def reach(self, point):
        """The host has seen something that comes after the point."""
        self._merge(self._over, point)

    def passed(self, point):
        return all(self._over.get(stream, 0) >= time for stream, time in point.items())

    def now(self):
        """The point at which all that is queued on all streams is over. From any thread."""
        point = dict(self._time)
        for stream in tuple(self._busy):
            point[stream] = point.get(stream, 0) + 1
        return point
