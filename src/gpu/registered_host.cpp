#include "gpu/registered_host.hpp"

namespace deltasync::gpu {

Result<RegisteredHost> RegisteredHost::make(Device& device, std::byte* data, std::uint64_t bytes,
                                            const std::shared_ptr<const void>& keeper, std::uint64_t part_bytes,
                                            const std::optional<CallContext>& until) {
  RegisteredHost made;
  made.data_ = data;
  made.part_bytes_ = part_bytes;
  for (std::uint64_t at = 0; at < bytes; at += part_bytes) {
    if (until) DS_TRY(until->check("registering host memory with " + device.name()));
    DS_ASSIGN(Memory part, device.register_host(data + at, std::min(part_bytes, bytes - at), keeper));
    made.parts_.push_back(std::move(part));
  }
  return made;
}

}  // namespace deltasync::gpu
