#include "board.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace emulator::hccl {
namespace {

constexpr size_t kPairs = kMostRanks * kMostRanks;
constexpr size_t kAllTrays = (kMostRanks + kPairs) * kTrays * kTray;
constexpr size_t kWorthGivingBack = size_t{16} << 20;
constexpr auto kForEver = std::chrono::hours(24 * 365);

}  // namespace

struct Board::Rank {
  std::atomic<int32_t> pid;  // 0: has not come yet
  std::atomic<int32_t> device;
  std::atomic<bool> left;
};

struct Board::Shared {
  uint64_t cookie;
  std::atomic<uint32_t> changes;  // a futex
  std::atomic<uint32_t> failed;   // 1 while the text is written, 2 when it is there
  char failure[512];
  Rank ranks[kMostRanks];
  Party everybody[kMostRanks];
  Party pairs[kPairs][2];
};

namespace {

constexpr size_t rounded(size_t nbytes) { return (nbytes + 4095) / 4096 * 4096; }

}  // namespace

RootInfo Board::make() {
  RootInfo root{getpid(), memfd_create("hccl", MFD_CLOEXEC), 0};
  const size_t head = rounded(sizeof(Shared));
  if (root.fd < 0 || ftruncate(root.fd, head + kAllTrays) != 0) {
    throw std::runtime_error(std::string("no shared memory for a communicator: ") + std::strerror(errno));
  }
  if (getrandom(&root.cookie, sizeof root.cookie, 0) < 0) throw std::runtime_error("no random numbers");
  void* mapped = mmap(nullptr, head, PROT_READ | PROT_WRITE, MAP_SHARED, root.fd, 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("a communicator's memory cannot be mapped");
  (new (mapped) Shared{})->cookie = root.cookie;
  munmap(mapped, head);
  return root;
}

Board::Board(const RootInfo& root, uint32_t ranks, uint32_t rank, int device, std::chrono::seconds patience)
    : ranks_(ranks), rank_(rank) {
  if (ranks == 0 || ranks > kMostRanks || rank >= ranks) {
    throw std::runtime_error("rank " + std::to_string(rank) + " of " + std::to_string(ranks) + ": emulated are 1 to " +
                             std::to_string(kMostRanks) + " ranks of one machine");
  }
  for (auto& process : processes_) process = -1;
  const std::string path = "/proc/" + std::to_string(root.pid) + "/fd/" + std::to_string(root.fd);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) {
    throw std::runtime_error("the root, process " + std::to_string(root.pid) +
                             ", is gone, or on another machine or in another container");
  }
  const size_t head = rounded(sizeof(Shared));
  void* mapped = mmap(nullptr, head + kAllTrays, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) throw std::runtime_error("a communicator's memory cannot be mapped");
  shared_ = static_cast<Shared*>(mapped);
  trays_ = static_cast<char*>(mapped) + head;
  try {
    join(root.cookie, device, patience);
  } catch (...) {
    leave();
    munmap(mapped, head + kAllTrays);
    throw;
  }
}

Board::~Board() {
  munmap(shared_, rounded(sizeof(Shared)) + kAllTrays);
  for (const auto& process : processes_) {
    if (process >= 0) close(process);
  }
}

void Board::join(uint64_t cookie, int device, std::chrono::seconds patience) {
  if (shared_->cookie != cookie) throw std::runtime_error("the root has given up this communicator");
  int32_t nobody = 0;
  shared_->ranks[rank_].device = device;
  if (!shared_->ranks[rank_].pid.compare_exchange_strong(nobody, getpid())) {
    throw std::runtime_error("there is a rank " + std::to_string(rank_) + " already, process " +
                             std::to_string(nobody));
  }
  changed();
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (uint32_t other = 0; other < ranks_; ++other) {
    for (;;) {
      const uint32_t before = changes();
      if (shared_->ranks[other].pid != 0) break;
      if (std::chrono::steady_clock::now() > deadline) {
        throw TimedOut("rank " + std::to_string(other) + " of " + std::to_string(ranks_) + " has not come within " +
                       std::to_string(patience.count()) + " s (HCCL_CONNECT_TIMEOUT)");
      }
      for (uint32_t each = 0; each < ranks_; ++each) {
        const bool is_lost = is_gone(each) || has_left(each);
        // Once all have come, one that is quick may have left before another has looked here again.
        if (is_lost && shared_->ranks[other].pid == 0) throw std::runtime_error(name_of(each) + " is gone");
      }
      sleep(before);
    }
  }
  check_devices();
}

void Board::check_devices() const {
  for (uint32_t one = 0; one < ranks_; ++one) {
    for (uint32_t other = one + 1; other < ranks_; ++other) {
      const int device = shared_->ranks[one].device;
      if (device != shared_->ranks[other].device) continue;
      throw std::runtime_error("ranks " + std::to_string(one) + " and " + std::to_string(other) +
                               " are both on device " + std::to_string(device) +
                               "; each needs one of its own: torch.npu.set_device(LOCAL_RANK), and --devices " +
                               std::to_string(ranks_) + " for as many ranks");
    }
  }
}

Channel Board::everybody() const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < ranks_; ++rank) ranks.push_back(rank);
  return {ranks, shared_->everybody, trays_};
}

Channel Board::pair(uint32_t from, uint32_t to) const {
  const size_t index = from * kMostRanks + to;
  return {{from, to}, shared_->pairs[index], trays_ + (kMostRanks + index) * kTrays * kTray};
}

void Board::clear(char* tray, size_t nbytes) {
  if (nbytes >= kWorthGivingBack) madvise(tray, rounded(nbytes), MADV_REMOVE);
}

void Board::changed() {
  ++shared_->changes;
  syscall(SYS_futex, &shared_->changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t Board::changes() const { return shared_->changes; }

void Board::sleep(uint32_t since) const {
  const timespec while_{0, 100'000'000};
  syscall(SYS_futex, &shared_->changes, FUTEX_WAIT, since, &while_, nullptr, 0);
}

std::string Board::name_of(uint32_t rank) const {
  const int pid = shared_->ranks[rank].pid;
  return "rank " + std::to_string(rank) + (pid == 0 ? "" : " (process " + std::to_string(pid) + ")");
}

// By a descriptor of the process, which is not fooled by a number that is used again or by a process that has ended
// and that nobody has asked about yet.
bool Board::is_gone(uint32_t rank) {
  const int pid = shared_->ranks[rank].pid;
  if (pid == 0 || rank == rank_) return false;
  if (processes_[rank] < 0) {
    const int process = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (process < 0) return errno == ESRCH;
    int none = -1;
    if (!processes_[rank].compare_exchange_strong(none, process)) close(process);
  }
  pollfd ended{processes_[rank], POLLIN, 0};
  return poll(&ended, 1, 0) > 0;
}

bool Board::has_left(uint32_t rank) const { return shared_->ranks[rank].left; }

void Board::leave() {
  shared_->ranks[rank_].left = true;
  changed();
}

void Board::fail(const std::string& why) {
  uint32_t not_yet = 0;
  if (!shared_->failed.compare_exchange_strong(not_yet, 1)) return;
  std::strncpy(shared_->failure, why.c_str(), sizeof shared_->failure - 1);
  shared_->failed = 2;
  changed();
}

bool Board::has_failed() const { return shared_->failed == 2; }

std::string Board::failure() const { return has_failed() ? shared_->failure : ""; }

std::chrono::seconds patience_of(const char* variable, std::chrono::seconds otherwise) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return otherwise;
  const int seconds = std::atoi(text);
  return seconds > 0 ? std::chrono::seconds(seconds) : std::chrono::seconds(kForEver);
}

}  // namespace emulator::hccl
