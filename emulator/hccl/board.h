// The board of a communicator: memory that its ranks' processes share. On it each rank says how far it has come, and
// there are trays into which it lays what it gives to others.
//
// The board is a memfd that the root makes and the others open through /proc/PID/fd: it has no name that a crash could
// leave behind, and does not count against the size of /dev/shm. Pages that nobody has touched cost nothing.
#pragma once

#include "signature.h"

#include "../runtime/joint_operation.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator::hccl {

constexpr size_t kTray = size_t{4} << 30;  // the most bytes that a rank gives in one operation
constexpr uint64_t kTrays = 2;             // while others read from one, a rank may fill the next
constexpr std::chrono::seconds kDefaultPatience{60};
constexpr uint64_t kStops = 64;            // how many operations a rank may be ahead in modelled time

// When a rank arrives at an operation in modelled time, how long it expects that to last, and how its link is used.
struct Stop {
  std::atomic<uint64_t> number;  // of the operation, written last
  Nanoseconds arrives;
  Nanoseconds lasts;
  LinkUse link;
};

// One rank on one channel. Operations are numbered from 1 there. Each has two steps: with number n, step 2n - 1 is
// done when the rank has laid out what it gives, and step 2n when it has taken what it gets.
struct Party {
  std::atomic<uint64_t> called;       // by the host: the number of the last one
  std::atomic<Kind> last_kind;        // and what that was
  std::atomic<HcclDataType> last_dtype;
  std::atomic<uint64_t> last_count;
  std::atomic<uint64_t> step;         // by the stream: the last one done
  std::atomic<uint64_t> wanted;       // by others: the step that they wait for
  Signature signatures[kTrays];
  Stop stops[kStops];
};

// All ranks, or two of them. A send and its receive are an operation of the pair's channel.
struct Channel {
  std::vector<uint32_t> ranks;
  Party* parties;  // as many
  char* trays;

  char* tray(size_t party, uint64_t number) const { return trays + (party * kTrays + number % kTrays) * kTray; }
};

struct RootInfo {
  int32_t pid;
  int32_t fd;
  uint64_t cookie;  // so that another one's descriptor is not taken for this one's
};

struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Board {
 public:
  static RootInfo make();

  // Blocks until all ranks are there. Throws TimedOut if that takes longer than `patience`, and std::runtime_error
  // where ranks are gone or do not go together.
  Board(const RootInfo& root, uint32_t ranks, uint32_t rank, int device, std::chrono::seconds patience);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  Channel everybody() const;
  Channel pair(uint32_t from, uint32_t to) const;  // the first party is the sender

  // Gives back the memory of a tray that nobody reads any more.
  static void clear(char* tray, size_t nbytes);

  // Tells all processes that something is different. Sleeps until then, or for a while.
  void changed();
  uint32_t changes() const;
  void sleep(uint32_t since) const;

  // "rank 1 (process 1234)", and whether it has ended or left.
  std::string name_of(uint32_t rank) const;
  bool is_gone(uint32_t rank);
  bool has_left(uint32_t rank) const;
  void leave();

  // Of the whole communicator, for all its ranks: the first one stays. Empty while there is none.
  void fail(const std::string& why);
  bool has_failed() const;
  std::string failure() const;

 private:
  struct Rank;
  struct Shared;

  void join(uint64_t cookie, int device, std::chrono::seconds patience);
  void check_devices() const;

  const uint32_t ranks_;
  const uint32_t rank_;
  Shared* shared_;
  char* trays_;
  std::atomic<int> processes_[kMostRanks];  // descriptors of them, -1 as long as there is none
};

// How many seconds that variable says, or else `otherwise`; 0 there means for ever.
std::chrono::seconds patience_of(const char* variable, std::chrono::seconds otherwise);

}  // namespace emulator::hccl
