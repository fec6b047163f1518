// Versions in the memory of fake devices, for tests of a writer that copies from there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "gpu/fake_device.hpp"
#include "tests/support/model.hpp"
#include "writer/session.hpp"

namespace deltasync::test {

/// Lends the test's devices.
class Lent final : public DeviceFinder {
 public:
  explicit Lent(std::map<std::int32_t, gpu::FakeDevice*> devices) : devices_(std::move(devices)) {}
  Result<gpu::Device*> find(std::int32_t ordinal) override {
    const auto found = devices_.find(ordinal);
    if (found == devices_.end()) return Error(Errc::unsupported, "there is no device " + std::to_string(ordinal));
    return static_cast<gpu::Device*>(found->second);
  }

 private:
  const std::map<std::int32_t, gpu::FakeDevice*> devices_;
};

/// A version in a device's memory, laid out like a half. It gets there by work in the trainer's stream, late.
class OnDevice {
 public:
  OnDevice(gpu::FakeDevice& device, std::int32_t ordinal, const std::vector<std::byte>& half)
      : ordinal_(ordinal), memory_(*device.allocate(half.size())), stream_(device.engine_stream()) {
    set(device, half);
  }
  void set(gpu::FakeDevice& device, const std::vector<std::byte>& half) {
    device.engine_work(stream_, [data = memory_.data(), half] { std::memcpy(data, half.data(), half.size()); });
  }
  SliceSource slice(const Layout& layout, std::uint32_t tensor, const Rect& rect) const {
    const Tensor& t = layout.tensors()[tensor];
    SliceSource item{{tensor, rect}, {}};
    item.source.data = memory_.data() + t.offset + rect.row * t.row_bytes() + rect.col * t.element_bytes;
    item.source.row_stride_bytes = static_cast<std::size_t>(t.row_bytes());
    item.source.device = {ordinal_};
    item.source.stream = stream_.raw;
    return item;
  }
  /// As slice(), of a version that lies as transposed() has it.
  SliceSource transposed_slice(const Layout& layout, std::uint32_t tensor, const Rect& rect) const {
    const Tensor& t = layout.tensors()[tensor];
    SliceSource item = slice(layout, tensor, rect);
    item.source.data = memory_.data() + t.offset + (rect.col * t.rows + rect.row) * t.element_bytes;
    item.source.row_stride_bytes = t.element_bytes;
    item.source.col_stride_bytes = static_cast<std::size_t>(t.rows * t.element_bytes);
    return item;
  }
  /// All tensors, those without a byte too.
  std::vector<SliceSource> all(const Layout& layout) const {
    std::vector<SliceSource> items;
    for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) {
      const Tensor& t = layout.tensors()[i];
      items.push_back(slice(layout, i, {0, 0, t.rows, t.cols}));
    }
    return items;
  }
  /// The same, the first being one that is neither empty nor too large to be under way at once.
  std::vector<SliceSource> all_after_one(const Layout& layout) const {
    auto items = all(layout);
    const auto fits = [&](const SliceSource& item) {
      const std::uint64_t bytes = layout.tensors()[item.slice.tensor].bytes;
      return bytes >= 1000 && bytes <= 90'000;
    };
    std::iter_swap(items.begin(), std::find_if(items.begin(), items.end(), fits));
    return items;
  }

 private:
  const std::int32_t ordinal_;
  const gpu::Memory memory_;
  const gpu::StreamHandle stream_;
};

}  // namespace deltasync::test
