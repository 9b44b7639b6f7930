// Events: a mark on one stream that other streams and the host can wait for.
#include "detector.h"
#include "fault.h"
#include "stream.h"

namespace emulator {
namespace {

// An event stands for its newest record. A wait keeps the mark that it was issued for, so the event may be recorded
// again, on any stream, or destroyed while it is in use.
class Event {
 public:
  aclError record(aclrtStream stream) {
    auto mark = std::make_shared<Mark>();
    const aclError code = submit(stream, {.name = "event_record", .reads = {}, .writes = {}, .body = {}, .reaches = mark});
    if (code != ACL_SUCCESS) return code;
    // Only now, when it is queued: a wait that got in before it on the same stream would never end.
    std::lock_guard lock(mutex_);
    newest_ = std::move(mark);
    return ACL_SUCCESS;
  }

  // Empty before the first record.
  std::shared_ptr<Mark> newest() {
    std::lock_guard lock(mutex_);
    return newest_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Mark> newest_;
};

Event& event_of(aclrtEvent handle) { return *static_cast<Event*>(handle); }

void host_waited(const Mark& mark) {
  if (Detector::on()) Detector::get().host_waited(mark.known());
}

}  // namespace
}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  if (const aclError code = fault("aclrtCreateEvent"); code != ACL_SUCCESS) return code;
  *event = new Event;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}

ACL_EXPORT aclError aclrtCreateEvent(aclrtEvent* event) { return aclrtCreateEventExWithFlag(event, 0); }

ACL_EXPORT aclError aclrtDestroyEvent(aclrtEvent event) {
  delete &event_of(event);
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) { return event_of(event).record(stream); }

ACL_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  const auto mark = event_of(event).newest();
  if (!mark) return ACL_SUCCESS;
  return submit(stream, {.name = "event_wait", .reads = {}, .writes = {}, .body = {}, .awaits = mark});
}

ACL_EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) {
  if (const auto mark = event_of(event).newest()) {
    mark->wait();
    host_waited(*mark);
  }
  return device_is_lost() ? lost() : ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  const auto mark = event_of(event).newest();
  const bool reached = !mark || mark->asked();
  if (mark && reached) host_waited(*mark);
  *status = reached ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclQueryEventRecordedStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  return aclrtQueryEventStatus(event, status);
}

// Waits are bound to a record when they are issued, so none is outstanding that a reset would have to cancel.
ACL_EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const auto from = event_of(start).newest();
  const auto to = event_of(end).newest();
  if (!from || !to || !from->reached() || !to->reached()) {
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime: an event has not been reached yet");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(to->when() - from->when()).count();
  return ACL_SUCCESS;
}
