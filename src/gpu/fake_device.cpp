#include "gpu/fake_device.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

namespace deltasync::gpu {
namespace {

constexpr std::uint64_t kArenaBytes = std::uint64_t{1} << 36;  ///< reserved, not used
constexpr std::align_val_t kPinnedAlignment{4096};

std::byte* reserve_arena() {
  void* const at = ::mmap(nullptr, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    std::perror("deltasync: address space for a fake device");
    std::abort();
  }
  return static_cast<std::byte*>(at);
}

/// The range of `ranges` that `at` is in, if `bytes` from there on are.
bool inside(const std::map<std::byte*, std::uint64_t>& ranges, const void* at, std::uint64_t bytes) {
  auto* const address = const_cast<std::byte*>(static_cast<const std::byte*>(at));
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return false;
  --next;
  const auto offset = static_cast<std::uint64_t>(address - next->first);
  return offset <= next->second && bytes <= next->second - offset;
}

}  // namespace

class FakeStream final : public Stream {
 public:
  FakeStream(FakeDevice& device, std::uint64_t stream) : device_(device), stream_(stream) {}

  Status copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) override {
    const auto work = [=] {
      if (bytes != 0) std::memcpy(device, host, static_cast<std::size_t>(bytes));
    };
    return copy(device, bytes, host, bytes, "copy to the device", work, /*into=*/true);
  }
  Status copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) override {
    return copy(device, bytes, host, bytes, "copy from the device", [=] {
      if (bytes != 0) std::memcpy(host, device, static_cast<std::size_t>(bytes));
    });
  }
  Status copy_out_rows(std::byte* host, std::uint64_t host_stride, const std::byte* device, std::uint64_t device_stride,
                       std::uint64_t row_bytes, std::uint64_t rows) override {
    if (rows == 0 || row_bytes == 0) return {};
    const std::uint64_t gaps = rows - 1;
    return copy(device, gaps * device_stride + row_bytes, host, gaps * host_stride + row_bytes,
                "copy rows from the device", [=] {
                  for (std::uint64_t row = 0; row < rows; ++row) {
                    std::memcpy(host + row * host_stride, device + row * device_stride,
                                static_cast<std::size_t>(row_bytes));
                  }
                });
  }
  Status zero(std::byte* device, std::uint64_t bytes) override {
    const std::lock_guard lock(device_.mutex_);
    if (!device_.on_device_locked(device, bytes)) {
      return device_.error("zero", Errc::internal, "memory that is not the device's");
    }
    DS_TRY(device_.count_locked(FakeDevice::Call::zero, "zero"));
    return device_.put_locked(stream_, {[=] { std::memset(device, 0, static_cast<std::size_t>(bytes)); }, {}, {}, 0});
  }
  Status launch(const Kernel& kernel) override {
    const std::lock_guard lock(device_.mutex_);
    return std::visit([&](const auto& k) { return launch_locked(k); }, kernel);
  }
  Status record(Event& event) override;
  Status wait_for(Event& event) override;
  Result<bool> is_captured() override;

 private:
  /// `device_bytes` and `host_bytes`: from the first byte to the last, gaps included.
  Status copy(const std::byte* device, std::uint64_t device_bytes, const std::byte* host, std::uint64_t host_bytes,
              const char* what, std::function<void()> work, bool into = false) {
    const std::lock_guard lock(device_.mutex_);
    DS_TRY(device_.count_locked(FakeDevice::Call::copy, what));
    DS_TRY(device_.check_copy_locked(device, device_bytes, host, host_bytes, what));
    ++device_.counts_.copies;
    device_.counts_.bytes_copied += host_bytes;
    if (into && inside(device_.registered_, host, host_bytes)) device_.counts_.copied_from_registered += host_bytes;
    return device_.put_locked(stream_, {std::move(work), {}, host, host_bytes});
  }
  template <class K>
  Status launch_locked(const K& kernel) {
    if (kernel.blocks() == 0) return {};
    DS_TRY(device_.count_locked(FakeDevice::Call::launch, "launch"));
    if (!device_.count_locked(FakeDevice::Call::endless_launch, "launch").ok()) device_.hangs_ = true;
    for (const void* const pointer : kernel.pointers()) {
      if (!device_.on_device_locked(pointer, 1)) {
        return device_.error("launch", Errc::internal, "a pointer to memory that is not the device's");
      }
    }
    ++device_.counts_.launches;
    return device_.put_locked(stream_, {[&device = device_, kernel] { device.run_kernel_locked(kernel); }, {}, {}, 0});
  }

  FakeDevice& device_;
  const std::uint64_t stream_;
};

class FakeEvent final : public Event {
 public:
  explicit FakeEvent(FakeDevice& device) : device_(device) {}
  Result<bool> done() override {
    const std::lock_guard lock(device_.mutex_);
    DS_TRY(device_.count_locked(FakeDevice::Call::done, "ask for an event"));
    if (!recorded_) return true;
    for (std::uint64_t i = device_.random_locked() % 8; i > 0 && !device_.reached_locked(mark_); --i) {
      if (!device_.step_locked()) break;
    }
    if (device_.dead_) return device_.error("ask for an event", Errc::io, "an operation before it went wrong");
    return device_.reached_locked(mark_);
  }

 private:
  friend class FakeStream;
  FakeDevice& device_;
  bool recorded_ = false;
  FakeDevice::Mark mark_;
};

Result<bool> FakeStream::is_captured() {
  const std::lock_guard lock(device_.mutex_);
  return device_.queues_[stream_].captured;
}

Status FakeStream::record(Event& event) {
  auto& fake = static_cast<FakeEvent&>(event);
  const std::lock_guard lock(device_.mutex_);
  DS_TRY(device_.count_locked(FakeDevice::Call::record, "record an event"));
  DS_TRY(device_.leave_capture_locked(stream_, "record an event"));
  fake.recorded_ = true;
  fake.mark_ = {stream_, device_.queues_[stream_].put};
  return {};
}

Status FakeStream::wait_for(Event& event) {
  const auto& fake = static_cast<const FakeEvent&>(event);
  const std::lock_guard lock(device_.mutex_);
  DS_TRY(device_.count_locked(FakeDevice::Call::wait_for, "wait for an event"));
  DS_TRY(device_.leave_capture_locked(stream_, "wait for an event"));
  if (!fake.recorded_) return {};
  return device_.put_locked(stream_, {nullptr, fake.mark_, {}, 0});
}

/// Host memory is registered with the process, for all devices; the last one ends that.
struct FakeDevice::Host {
  std::mutex mutex;  ///< taken last
  std::map<std::byte*, std::uint64_t> registered;
  std::map<std::byte*, int> users;
  std::set<FakeDevice*> devices;
};

FakeDevice::Host& FakeDevice::host() {
  static Host all;
  return all;
}

FakeDevice::FakeDevice(const Options& options)
    : options_(options),
      name_("cuda:" + std::to_string(options.ordinal) + " (fake, seed " + std::to_string(options.seed) + ")"),
      page_bytes_(static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))),
      arena_(reserve_arena()),
      random_state_(options.seed) {
  const std::lock_guard lock(host().mutex);
  host().devices.insert(this);
}

FakeDevice::~FakeDevice() {
  {
    const std::lock_guard lock(host().mutex);
    host().devices.erase(this);
    for (const auto& [data, bytes] : registered_) {
      if (--host().users[data] == 0) host().registered.erase(data);
    }
  }
  ::munmap(arena_, kArenaBytes);
  for (const auto& [data, bytes] : pinned_) ::operator delete(data, kPinnedAlignment);
}

Error FakeDevice::error(const std::string& what, Errc code, const std::string& why) const {
  return {code, name_ + ": " + what + ": " + why};
}

std::uint64_t FakeDevice::random_locked() noexcept {
  return delta::mix(random_state_ += delta::kDigestStep);
}

Status FakeDevice::count_locked(Call call, const std::string& what) {
  if (dead_) return error(what, Errc::io, "an operation before it went wrong");
  const auto fault = faults_.find(call);
  if (fault == faults_.end() || --fault->second != 0) return {};
  faults_.erase(fault);
  const bool memory = call == Call::allocate || call == Call::pin || call == Call::register_host;
  return error(what, memory ? Errc::no_space : Errc::io, "a failure that a test asked for");
}

Result<Memory> FakeDevice::allocate(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::string what = "allocate " + std::to_string(bytes) + " bytes";
  DS_TRY(count_locked(Call::allocate, what));
  if (full_ || bytes > options_.memory_bytes - memory_used_) return error(what, Errc::no_space, "out of memory");
  // A page that is never there follows each allocation, which ends at it as far as its alignment allows.
  const std::uint64_t pages = (bytes + page_bytes_) / page_bytes_ * page_bytes_;
  if (pages + page_bytes_ > kArenaBytes - arena_used_) return error(what, Errc::no_space, "out of addresses");
  std::byte* const data = arena_ + arena_used_ + (pages - bytes) / 256 * 256;
  arena_used_ += pages + page_bytes_;
  memory_used_ += bytes;
  allocations_.emplace(data, bytes);
  ++counts_.allocations;
  // What is in it is left to chance, and not to zeros.
  unlock_memory_locked(true);
  std::memset(data, 0xC5, static_cast<std::size_t>(bytes));
  unlock_memory_locked(false);
  return Memory(*this, Memory::Kind::device, data, bytes);
}

Result<Memory> FakeDevice::pin(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::string what = "pin " + std::to_string(bytes) + " bytes";
  DS_TRY(count_locked(Call::pin, what));
  if (bytes > options_.pinned_bytes - counts_.pinned_bytes) return error(what, Errc::no_space, "out of memory");
  auto* const data = static_cast<std::byte*>(
      ::operator new(static_cast<std::size_t>(std::max<std::uint64_t>(1, bytes)), kPinnedAlignment, std::nothrow));
  if (data == nullptr) return error(what, Errc::no_space, "out of memory");
  std::memset(data, 0xC7, static_cast<std::size_t>(bytes));
  pinned_.emplace(data, bytes);
  counts_.pinned_bytes += bytes;
  counts_.pinned_bytes_most = std::max(counts_.pinned_bytes_most, counts_.pinned_bytes);
  return Memory(*this, Memory::Kind::pinned, data, bytes);
}

Result<Memory> FakeDevice::register_host(std::byte* data, std::uint64_t bytes,
                                         std::shared_ptr<const void> /*ended at once*/) {
  const std::lock_guard lock(mutex_);
  const std::string what = "register " + std::to_string(bytes) + " bytes of the host";
  DS_TRY(count_locked(Call::register_host, what));
  if (reinterpret_cast<std::uintptr_t>(data) % page_bytes_ != 0) {
    return error(what, Errc::internal, "they do not begin a page");
  }
  if (!registered_.emplace(data, bytes).second) return error(what, Errc::internal, "they are registered already");
  counts_.registered_bytes += bytes;
  const std::lock_guard of_host(host().mutex);
  host().registered.emplace(data, bytes);
  ++host().users[data];
  return Memory(*this, Memory::Kind::registered, data, bytes);
}

bool FakeDevice::waits_for_host_locked(const std::byte* host, std::uint64_t bytes) const {
  return std::any_of(queues_.begin(), queues_.end(), [&](const Queue& queue) {
    return std::any_of(queue.waiting.begin(), queue.waiting.end(), [&](const Operation& operation) {
      return operation.host_bytes != 0 && operation.host < host + bytes && host < operation.host + operation.host_bytes;
    });
  });
}

void FakeDevice::release_host(std::byte* data, std::uint64_t bytes) noexcept {
  std::set<FakeDevice*> devices{this};
  {
    const std::lock_guard lock(host().mutex);
    if (--host().users[data] == 0) {
      host().registered.erase(data);
      devices = host().devices;
    }
  }
  for (FakeDevice* const device : devices) {
    const std::lock_guard lock(device->mutex_);
    if (!device->waits_for_host_locked(data, bytes)) continue;
    std::fputs("deltasync: host memory is let go while a copy to a fake device or from it waits\n", stderr);
    std::abort();
  }
}

void FakeDevice::give_back(Memory::Kind kind, std::byte* data, std::uint64_t bytes) noexcept {
  if (kind == Memory::Kind::registered) release_host(data, bytes);
  const std::lock_guard lock(mutex_);
  if (kind == Memory::Kind::registered) {
    registered_.erase(data);
    counts_.registered_bytes -= bytes;
    return;
  }
  if (kind == Memory::Kind::pinned) {
    pinned_.erase(data);
    counts_.pinned_bytes -= bytes;
    ::operator delete(data, kPinnedAlignment);
    return;
  }
  allocations_.erase(data);
  memory_used_ -= bytes;
  --counts_.allocations;
  auto* const page = data - (static_cast<std::uint64_t>(data - arena_) % page_bytes_);
  ::madvise(page, static_cast<std::size_t>(data + bytes - page), MADV_DONTNEED);
}

Result<std::unique_ptr<Stream>> FakeDevice::make_stream() {
  const std::lock_guard lock(mutex_);
  queues_.emplace_back();
  return std::unique_ptr<Stream>(std::make_unique<FakeStream>(*this, queues_.size() - 1));
}

StreamHandle FakeDevice::engine_stream() {
  const std::lock_guard lock(mutex_);
  queues_.emplace_back();
  engine_streams_.push_back(queues_.size() - 1);
  return {&engine_streams_.back()};
}

Result<std::unique_ptr<Stream>> FakeDevice::adopt_stream(StreamHandle handle) {
  const std::lock_guard lock(mutex_);
  for (std::uint64_t& stream : engine_streams_) {
    if (&stream == handle.raw) return std::unique_ptr<Stream>(std::make_unique<FakeStream>(*this, stream));
  }
  return error("adopt a stream", Errc::invalid_argument, "it is none of this device's");
}

Result<std::unique_ptr<Event>> FakeDevice::make_event() {
  return std::unique_ptr<Event>(std::make_unique<FakeEvent>(*this));
}

void FakeDevice::engine_work(StreamHandle handle, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  const Status put = put_locked(*static_cast<std::uint64_t*>(handle.raw), {std::move(work), {}, {}, 0});
  if (!put.ok()) std::abort();
}

bool FakeDevice::drain() {
  const std::lock_guard lock(mutex_);
  while (step_locked()) {
  }
  return std::all_of(queues_.begin(), queues_.end(), [](const Queue& queue) { return queue.waiting.empty(); });
}

void FakeDevice::peek(const std::byte* device, std::byte* host, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  unlock_memory_locked(true);
  std::memcpy(host, device, static_cast<std::size_t>(bytes));
  unlock_memory_locked(false);
}

void FakeDevice::poke(std::byte* device, const std::byte* host, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  unlock_memory_locked(true);
  std::memcpy(device, host, static_cast<std::size_t>(bytes));
  unlock_memory_locked(false);
}

bool FakeDevice::idle() const {
  const std::lock_guard lock(mutex_);
  for (std::uint64_t i = 0; i < queues_.size(); ++i) {
    const bool engines = std::find(engine_streams_.begin(), engine_streams_.end(), i) != engine_streams_.end();
    if (!engines && !queues_[i].waiting.empty()) return false;
  }
  return true;
}

void FakeDevice::fail(Call call, std::uint64_t n) {
  const std::lock_guard lock(mutex_);
  faults_[call] = n;
}

std::size_t FakeDevice::forget_faults() {
  const std::lock_guard lock(mutex_);
  const std::size_t left = faults_.size();
  faults_.clear();
  return left;
}

void FakeDevice::die(std::uint64_t n) {
  const std::lock_guard lock(mutex_);
  dies_in_ = n;
}

void FakeDevice::revive() {
  const std::lock_guard lock(mutex_);
  dead_ = false;
  for (Queue& queue : queues_) {
    queue.done += queue.waiting.size();
    queue.waiting.clear();
  }
}

void FakeDevice::hang(bool hangs) {
  const std::lock_guard lock(mutex_);
  hangs_ = hangs;
}

void FakeDevice::hold(StreamHandle handle, bool holds) {
  const std::lock_guard lock(mutex_);
  queues_[*static_cast<std::uint64_t*>(handle.raw)].held = holds;
}

void FakeDevice::capture(StreamHandle handle, bool captures) {
  const std::lock_guard lock(mutex_);
  queues_[*static_cast<std::uint64_t*>(handle.raw)].captured = captures;
}

bool FakeDevice::capture_ended_by_others() const {
  const std::lock_guard lock(mutex_);
  return capture_ended_;
}

void FakeDevice::fill(bool full) {
  const std::lock_guard lock(mutex_);
  full_ = full;
}

FakeDevice::Counts FakeDevice::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

Status FakeDevice::leave_capture_locked(std::uint64_t stream, const std::string& what) {
  if (!queues_[stream].captured) return {};
  capture_ended_ = true;
  return error(what, Errc::io, "the stream is captured as a graph");
}

Status FakeDevice::put_locked(std::uint64_t stream, Operation operation) {
  queues_[stream].waiting.push_back(std::move(operation));
  ++queues_[stream].put;
  if (options_.lazy) return {};
  // Sometimes a device is quick.
  for (std::uint64_t i = random_locked() % 3; i > 0; --i) {
    if (!step_locked()) break;
  }
  return {};
}

/// Runs the next operation of some stream whose turn can have come. False if there is none.
bool FakeDevice::step_locked() {
  if (hangs_ || dead_) return false;
  const std::uint64_t from = random_locked();
  for (std::uint64_t i = 0; i < queues_.size(); ++i) {
    Queue& queue = queues_[(from + i) % queues_.size()];
    if (queue.waiting.empty() || queue.held) continue;
    const Operation& next = queue.waiting.front();
    if (!next.work && !reached_locked(next.mark)) continue;
    if (next.work) {
      if (dies_in_ != 0 && --dies_in_ == 0) dead_ = true;
      unlock_memory_locked(true);
      if (!dead_ || next.host_bytes == 0) next.work();
      unlock_memory_locked(false);
    }
    queue.waiting.pop_front();
    ++queue.done;
    return true;
  }
  return false;
}

bool FakeDevice::on_device_locked(const void* at, std::uint64_t bytes) const {
  return inside(allocations_, at, bytes);
}

Status FakeDevice::check_copy_locked(const std::byte* device, std::uint64_t device_bytes, const std::byte* host,
                                     std::uint64_t host_bytes, const std::string& what) const {
  if (!on_device_locked(device, device_bytes)) return error(what, Errc::internal, "memory that is not the device's");
  if (inside(pinned_, host, host_bytes)) return {};
  const std::lock_guard lock(FakeDevice::host().mutex);
  if (inside(registered_, host, host_bytes) && inside(FakeDevice::host().registered, host, host_bytes)) return {};
  return error(what, Errc::internal, "host memory that is neither pinned nor registered");
}

void FakeDevice::unlock_memory_locked(bool open) noexcept {
  for (const auto& [data, bytes] : allocations_) {
    const std::uint64_t into = static_cast<std::uint64_t>(data - arena_) % page_bytes_;
    if (::mprotect(data - into, static_cast<std::size_t>(bytes + into), open ? PROT_READ | PROT_WRITE : PROT_NONE) == 0)
      continue;
    std::perror("deltasync: memory of a fake device");
    std::abort();
  }
}

template <class K>
void FakeDevice::run_kernel_locked(const K& kernel) {
  // A random odd step goes through all threads of a block, whose number is a power of two; blocks are shuffled.
  std::vector<std::uint64_t> blocks(static_cast<std::size_t>(kernel.blocks()));
  std::iota(blocks.begin(), blocks.end(), std::uint64_t{0});
  for (std::size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[random_locked() % i]);
  static_assert((kBlockThreads & (kBlockThreads - 1)) == 0);
  if (dead_) blocks.resize(blocks.size() / 2);
  for (const std::uint64_t block : blocks) {
    const std::uint64_t step = random_locked() | 1;
    const std::uint64_t first = random_locked();
    for (std::uint64_t i = 0; i < kBlockThreads; ++i) {
      const auto thread = static_cast<std::uint32_t>((first + i * step) % kBlockThreads);
      if constexpr (requires { kernel.sum(block, thread); }) {
        *kernel.sum_of(block) += kernel.sum(block, thread);
      } else {
        kernel.run(block, thread);
      }
    }
  }
}

}  // namespace deltasync::gpu
