// Building a layout: every check on what the user or a peer describes, then everything that is derived from it.
#include <algorithm>
#include <cassert>

#include "base/bytes.hpp"
#include "base/hash.hpp"
#include "base/utf8.hpp"
#include "format/layout_index.hpp"

namespace deltasync {
namespace {

constexpr std::uint64_t round_up(std::uint64_t n, std::uint64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

Error wrong(const std::string& tensor, const std::string& what) {
  return {Errc::invalid_argument, "tensor '" + tensor + "': " + what};
}

Status check_name(const std::string& name, std::size_t position) {
  if (!name.empty() && name.size() <= kTensorNameBytesMax && name != "__metadata__" && is_plain_text(name)) return {};
  const auto which = "tensor " + std::to_string(position) + ": ";
  if (name.empty()) return Error(Errc::invalid_argument, which + "its name is empty");
  if (name.size() > kTensorNameBytesMax) {
    return Error(Errc::invalid_argument, which + "its name has " + std::to_string(name.size()) + " bytes, more than " +
                                             std::to_string(kTensorNameBytesMax));
  }
  // A safetensors header could not tell this tensor from its own free-form part.
  if (name == "__metadata__") return Error(Errc::invalid_argument, which + "the name __metadata__ is reserved");
  if (!is_utf8(name)) return Error(Errc::invalid_argument, which + "its name is not UTF-8");
  return Error(Errc::invalid_argument, which + "its name '" + printable(name) + "' contains a control character");
}

Status check_cuts(const TensorSpec& spec, const char* kind, const std::vector<std::uint64_t>& cuts,
                  std::uint64_t length) {
  if (cuts.size() > kTensorCutsMax) {
    return wrong(spec.name,
                 std::to_string(cuts.size()) + " " + kind + " cuts, more than " + std::to_string(kTensorCutsMax));
  }
  std::uint64_t before = 0;
  for (const auto cut : cuts) {
    if (cut <= before || cut >= length) {
      return wrong(spec.name, std::string(kind) + " cut " + std::to_string(cut) + " is not between " +
                                  std::to_string(before) + " and " + std::to_string(length));
    }
    before = cut;
  }
  return {};
}

/// Fills in rows, cols, element_bytes and bytes. Each product is bounded before it is made; the bytes, at most eight
/// times the limit here, are bounded together with the offset.
Status derive_view(Tensor& t) {
  const auto& shape = t.spec.shape;
  t.element_bytes = static_cast<std::uint32_t>(dtype_bytes(t.spec.dtype));
  if (t.element_bytes == 0) {
    return Error(Errc::unsupported,
                 "tensor '" + t.spec.name + "': unknown dtype " + std::to_string(static_cast<unsigned>(t.spec.dtype)));
  }
  if (shape.size() > kTensorDimsMax) {
    return wrong(t.spec.name,
                 std::to_string(shape.size()) + " dimensions, more than " + std::to_string(kTensorDimsMax));
  }
  if (std::find(shape.begin(), shape.end(), 0u) != shape.end()) return {};  // no element: 0×0
  std::uint64_t elements = 1;
  for (const auto dim : shape) {
    if (dim > kModelBytesMax / elements) return wrong(t.spec.name, "larger than any model may be");
    elements *= dim;
  }
  const std::uint64_t packed = dtype_packed(t.spec.dtype);
  if ((shape.empty() ? 1 : shape.back()) % packed != 0) {
    return wrong(t.spec.name, "its last dimension is no multiple of the " + std::to_string(packed) + " values that " +
                                  std::string(to_string(t.spec.dtype)) + " has in a byte");
  }
  elements /= packed;
  t.cols = shape.empty() ? 1 : shape.back() / packed;
  t.rows = elements / t.cols;
  t.bytes = elements * t.element_bytes;
  return {};
}

}  // namespace

Status derive(Tensor& t, std::size_t position) {
  DS_TRY(check_name(t.spec.name, position));
  DS_TRY(derive_view(t));
  DS_TRY(check_cuts(t.spec, "row", t.spec.row_cuts, t.rows));
  return check_cuts(t.spec, "column", t.spec.col_cuts, t.cols);
}

Layout::Layout() : index_(std::make_unique<Index>()) {}
Layout::~Layout() = default;

Result<LayoutPtr> Layout::build(std::vector<TensorSpec> specs) {
  if (specs.size() > kTensorsMax) {
    return Error(Errc::invalid_argument,
                 std::to_string(specs.size()) + " tensors, more than " + std::to_string(kTensorsMax));
  }
  std::vector<Tensor> tensors(specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    tensors[i].spec = std::move(specs[i]);
    DS_TRY(derive(tensors[i], i));
  }
  return make(std::move(tensors));
}

Result<LayoutPtr> Layout::make(std::vector<Tensor> derived) {
  std::shared_ptr<Layout> layout(new Layout);
  auto& index = *layout->index_;
  layout->tensors_ = std::move(derived);
  const auto& tensors = layout->tensors_;
  index.names.reserve(tensors.size());
  index.first_tile.reserve(tensors.size());
  index.geometry.reserve(tensors.size());

  std::uint64_t end = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Tensor& t = layout->tensors_[i];
    t.offset = round_up(end, kTensorAlignment);
    end = t.offset + t.bytes;
    if (end > kModelBytesMax) {
      return wrong(t.spec.name, "the tensors up to it need more than " + std::to_string(kModelBytesMax) + " bytes");
    }
    const auto geometry = tile_geometry(t.spec, t.rows, t.cols);
    t.first_tile = layout->tile_count_;
    t.tile_count = geometry.bands * geometry.panels;
    layout->tile_count_ += t.tile_count;
    layout->model_bytes_ += t.bytes;
    layout->elements_ += t.rows * t.cols;
    index.first_tile.push_back(t.first_tile);
    index.geometry.push_back(geometry);
    index.names.push_back({xxh3_64(bytes_of(std::string_view(t.spec.name))), static_cast<std::uint32_t>(i)});
  }
  layout->half_bytes_ = round_up(end, kTensorAlignment);

  // Sorted rather than hashed into buckets: names of a hostile layout cannot make this quadratic.
  std::sort(index.names.begin(), index.names.end(), [&](const Index::Name& a, const Index::Name& b) {
    if (a.hash != b.hash) return a.hash < b.hash;
    return tensors[a.tensor].spec.name < tensors[b.tensor].spec.name;
  });
  const auto twin =
      std::adjacent_find(index.names.begin(), index.names.end(), [&](const Index::Name& a, const Index::Name& b) {
        return a.hash == b.hash && tensors[a.tensor].spec.name == tensors[b.tensor].spec.name;
      });
  if (twin != index.names.end()) return wrong(tensors[twin->tensor].spec.name, "listed twice");

  layout->digest_ = xxh3_128(layout->encode());
  return LayoutPtr(std::move(layout));
}

std::optional<std::uint32_t> Layout::find(std::string_view name) const {
  const auto hash = xxh3_64(bytes_of(name));
  const auto first = std::lower_bound(index_->names.begin(), index_->names.end(), hash,
                                      [](const Index::Name& a, std::uint64_t h) { return a.hash < h; });
  for (auto it = first; it != index_->names.end() && it->hash == hash; ++it) {
    if (tensors_[it->tensor].spec.name == name) return it->tensor;
  }
  return std::nullopt;
}

namespace {

/// Puts 1/n, 2/n … of `length` into `cuts`, if n divides it.
void merge_even_cuts(std::vector<std::uint64_t>& cuts, std::uint64_t length, std::uint64_t n) {
  if (length == 0 || length % n != 0) return;
  for (std::uint64_t i = 1; i < n; ++i) cuts.push_back(i * (length / n));
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
}

}  // namespace

void add_even_cuts(std::vector<TensorSpec>& specs, std::uint64_t n) {
  if (n <= 1) return;
  for (auto& spec : specs) {
    Tensor view;
    view.spec.name = spec.name;
    view.spec.dtype = spec.dtype;
    view.spec.shape = spec.shape;
    if (!derive_view(view)) continue;  // build() will say what is wrong with it
    if (spec.shape.size() >= 2) merge_even_cuts(spec.row_cuts, view.rows, n);
    if (!spec.shape.empty()) merge_even_cuts(spec.col_cuts, view.cols, n);
  }
}

}  // namespace deltasync
