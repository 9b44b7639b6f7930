// CANN's functions on streams.
#include "captures.h"
#include "copy.h"
#include "device.h"
#include "fault.h"
#include "stream.h"

using namespace emulator;

// The host has waited.
static aclError told(const StreamError& error) {
  land_late_bytes();
  if (device_is_lost()) return lost();
  return error.code == ACL_SUCCESS ? ACL_SUCCESS : fail(error.code, error.message);
}

static aclError unknown(const char* function) {
  return fail(ACL_ERROR_RT_STREAM_CONTEXT, std::string(function) + ": not a stream, or one that was destroyed");
}

static aclError captured(const char* function) {
  return refuse_captured(ACL_ERROR_RT_STREAM_CAPTURED, function, "the stream");
}

ACL_EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  if (const aclError code = fault("aclrtCreateStream"); code != ACL_SUCCESS) return code;
  *stream = Streams::all().make(current_device()).get();
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

ACL_EXPORT aclError aclrtDestroyStream(aclrtStream handle) {
  const auto stream = handle == nullptr ? nullptr : Streams::all().find(handle);
  if (!stream) return unknown("aclrtDestroyStream");
  if (stream->capture()) return captured("aclrtDestroyStream");
  Streams::all().destroy(stream);
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

ACL_EXPORT aclError aclrtSynchronizeStream(aclrtStream handle) {
  const auto stream = Streams::all().find(handle);
  if (!stream) return unknown("aclrtSynchronizeStream");
  return stream->capture() ? captured("aclrtSynchronizeStream") : told(stream->synchronize());
}

// The timeout is not kept: an operation of the emulator ends, or the test that waits for it has one of its own.
ACL_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}

ACL_EXPORT aclError aclrtSynchronizeDevice() {
  if (Streams::all().captures(current_device())) {
    return refuse_captured(ACL_ERROR_RT_STREAM_CAPTURED, "aclrtSynchronizeDevice", "a stream of the device");
  }
  return told(Streams::all().synchronize(current_device()));
}

ACL_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

ACL_EXPORT aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  const auto stream = Streams::all().find(handle);
  if (!stream) return unknown("aclrtStreamQuery");
  if (device_is_lost()) return lost();
  if (stream->capture()) return captured("aclrtStreamQuery");
  *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

// For the Python package: a kernel of which only its time counts. moved: bytes to and from memory.
ACL_EXPORT aclError ascend_emulator_put_kernel(const char* name, aclrtStream stream, size_t written, double moved) {
  return submit(
      stream,
      {.name = name, .reads = {}, .writes = {{nullptr, written}}, .body = [] {}, .work = {.nbytes = moved}});
}

ACL_EXPORT aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  const auto stream = Streams::all().find(handle);
  if (!stream) return unknown("aclrtStreamGetId");
  *id = stream->id();
  return ACL_SUCCESS;
}
