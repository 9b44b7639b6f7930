#include "stream.h"

#include <algorithm>
#include <atomic>
#include <exception>

namespace emulator {
namespace {

int next_stream_id() {
  static std::atomic<int> last{0};
  return ++last;
}

aclError told(const StreamError& error) {
  return error.code == ACL_SUCCESS ? ACL_SUCCESS : fail(error.code, error.message);
}

aclError unknown(const char* function) {
  return fail(ACL_ERROR_RT_STREAM_CONTEXT, std::string(function) + ": not a stream, or one that was destroyed");
}

// PyTorch adds a C++ backtrace below the message of its exceptions.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

Stream::Stream() : id_(next_stream_id()), thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  arrived_.notify_all();
  thread_.join();
}

void Stream::push(Operation operation) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(operation));
    ++pushed_;
  }
  arrived_.notify_one();
}

StreamError Stream::synchronize() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this, last = pushed_] { return done_ >= last; });
  return error_;
}

bool Stream::idle() {
  std::lock_guard lock(mutex_);
  return done_ == pushed_;
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    execute(operation);
    operation = {};  // what the body holds is let go before the operation counts as done
    lock.lock();
    ++done_;
    finished_.notify_all();
  }
}

void Stream::execute(Operation& operation) {
  try {
    operation.body();
  } catch (const std::exception& failure) {
    std::lock_guard lock(mutex_);
    if (error_.code == ACL_SUCCESS) {
      error_ = {ACL_ERROR_RT_INTERNAL_ERROR, operation.name + " failed on the device: " + first_line(failure.what())};
    }
  }
}

Streams& Streams::all() {
  static auto* streams = new Streams;
  return *streams;
}

aclrtStream Streams::create() {
  std::lock_guard lock(mutex_);
  return streams_.emplace_back(std::make_shared<Stream>()).get();
}

std::shared_ptr<Stream> Streams::find(aclrtStream handle) {
  std::lock_guard lock(mutex_);
  if (handle == nullptr) {
    if (!default_) default_ = streams_.emplace_back(std::make_shared<Stream>());
    return default_;
  }
  auto found = std::find_if(streams_.begin(), streams_.end(), [=](auto& stream) { return stream.get() == handle; });
  return found == streams_.end() ? nullptr : *found;
}

void Streams::destroy(const std::shared_ptr<Stream>& stream) {
  {
    std::lock_guard lock(mutex_);
    std::erase(streams_, stream);
  }
  stream->synchronize();
}

std::vector<std::shared_ptr<Stream>> Streams::list() {
  std::lock_guard lock(mutex_);
  return streams_;
}

StreamError Streams::synchronize() {
  StreamError first;
  for (const auto& stream : list()) {
    StreamError error = stream->synchronize();
    if (first.code == ACL_SUCCESS) first = error;
  }
  return first;
}

bool Streams::idle() {
  for (const auto& stream : list()) {
    if (!stream->idle()) return false;
  }
  return true;
}

aclError submit(aclrtStream handle, Operation operation) {
  const auto stream = Streams::all().find(handle);
  if (!stream) return unknown(operation.name.c_str());
  stream->push(std::move(operation));
  return ACL_SUCCESS;
}

}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  *stream = Streams::all().create();
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

ACL_EXPORT aclError aclrtDestroyStream(aclrtStream handle) {
  const auto stream = handle == nullptr ? nullptr : Streams::all().find(handle);
  if (!stream) return unknown("aclrtDestroyStream");
  Streams::all().destroy(stream);
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

ACL_EXPORT aclError aclrtSynchronizeStream(aclrtStream handle) {
  const auto stream = Streams::all().find(handle);
  return stream ? told(stream->synchronize()) : unknown("aclrtSynchronizeStream");
}

// The timeout is not kept: an operation of the emulator ends, or the test that waits for it has one of its own.
ACL_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}

ACL_EXPORT aclError aclrtSynchronizeDevice() { return told(Streams::all().synchronize()); }

ACL_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

ACL_EXPORT aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  const auto stream = Streams::all().find(handle);
  if (!stream) return unknown("aclrtStreamQuery");
  *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  const auto stream = Streams::all().find(handle);
  if (!stream) return unknown("aclrtStreamGetId");
  *id = stream->id();
  return ACL_SUCCESS;
}
