#include "gpu/nccl.hpp"

#include <dlfcn.h>

#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace deltasync::gpu {
namespace {

// As nccl.h has them: its results and types are enumerations, communicators and streams are pointers.
using NcclResult = int;
using NcclComm = void*;
constexpr NcclResult kSuccess = 0;
constexpr int kUint8 = 1;

struct Nccl {
  NcclResult (*init_all)(NcclComm* comms, int count, const int* devices) = nullptr;
  NcclResult (*abort)(NcclComm comm) = nullptr;
  NcclResult (*broadcast)(const void* from, void* to, std::size_t count, int type, int root, NcclComm comm,
                          void* stream) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  const char* (*words_of)(NcclResult result) = nullptr;
  std::string missing;  ///< why there is none

  static Nccl load() {
    Nccl nccl;
    void* const library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);  // never closed
    if (library == nullptr) {
      const char* const why = ::dlerror();
      nccl.missing = why != nullptr ? why : "libnccl.so.2";
      return nccl;
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      if (function == nullptr) nccl.missing = std::string("libnccl.so.2 has no ") + name;
    };
    find(nccl.init_all, "ncclCommInitAll");
    find(nccl.abort, "ncclCommAbort");
    find(nccl.broadcast, "ncclBroadcast");
    find(nccl.group_start, "ncclGroupStart");
    find(nccl.group_end, "ncclGroupEnd");
    find(nccl.words_of, "ncclGetErrorString");
    return nccl;
  }
  Status check(NcclResult result, const char* call) const {
    if (result == kSuccess) return {};
    return Error(Errc::io, std::string(call) + ": " + words_of(result) + " (" + std::to_string(result) + ")");
  }
};

const Nccl& nccl() {
  static const Nccl loaded = Nccl::load();
  return loaded;
}

class NcclBroadcast final : public Broadcast {
 public:
  explicit NcclBroadcast(std::vector<NcclComm> comms) : comms_(std::move(comms)) {}
  ~NcclBroadcast() override {
    // ncclCommDestroy() would wait, without a deadline, for a broadcast that does not end.
    for (NcclComm comm : comms_) static_cast<void>(nccl().abort(comm));
  }
  NcclBroadcast(const NcclBroadcast&) = delete;
  NcclBroadcast& operator=(const NcclBroadcast&) = delete;

  Status run(std::span<std::byte* const> memories, std::uint64_t bytes, std::span<Stream* const> streams) override {
    DS_TRY(nccl().check(nccl().group_start(), "ncclGroupStart"));
    Status first;
    for (std::size_t i = 0; i < comms_.size() && first.ok(); ++i) {
      first = nccl().check(nccl().broadcast(memories[i], memories[i], static_cast<std::size_t>(bytes), kUint8, 0,
                                            comms_[i], streams[i]->handle().raw),
                           "ncclBroadcast");
    }
    Status ended = nccl().check(nccl().group_end(), "ncclGroupEnd");  // begun is ended, whatever went wrong
    return first.ok() ? ended : first;
  }

 private:
  const std::vector<NcclComm> comms_;
};

}  // namespace

Result<std::unique_ptr<Broadcast>> open_nccl_broadcast(std::span<const std::int32_t> ordinals) {
  if (!nccl().missing.empty()) return Error(Errc::unsupported, "NCCL: " + nccl().missing);
  std::vector<NcclComm> comms(ordinals.size());
  const std::vector<int> devices(ordinals.begin(), ordinals.end());
  DS_TRY(
      nccl().check(nccl().init_all(comms.data(), static_cast<int>(devices.size()), devices.data()), "ncclCommInitAll"));
  return std::unique_ptr<Broadcast>(std::make_unique<NcclBroadcast>(std::move(comms)));
}

}  // namespace deltasync::gpu
