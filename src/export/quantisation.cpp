#include "export/quantisation.hpp"

#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "export/trainer_tensors.hpp"

namespace deltasync::exporting {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kDone =
    "exported are fp8 (E4M3) with scales of blocks, or one of each tensor: quant_method fp8 and compressed-tensors";
constexpr std::uint64_t kBlockMax = 1 << 20;  ///< rows or columns
constexpr std::size_t kWordsMax = 32;         ///< of a name, between points, that is looked at

/// What quantization_config says of all quantised tensors.
struct Scheme {
  std::optional<std::pair<std::uint64_t, std::uint64_t>> block;  ///< none: the tensor has one scale
  bool powers = false;                                           ///< scales are powers of two
  std::set<std::string, std::less<>> unquantised;                ///< modules
};

const Json* member(const Json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return !object.is_object() || found == object.end() || found->is_null() ? nullptr : &*found;
}

std::string text_or(const Json& object, const char* key, const char* otherwise) {
  const Json* found = member(object, key);
  return found == nullptr ? otherwise : found->is_string() ? found->get<std::string>() : found->dump();
}

Error unsupported(const std::string& what) {
  return Error(Errc::unsupported,
               "config.json: quantization_config: " + what + " is not exported; " + std::string(kDone));
}

const Json* config_in(const Json& config) {
  for (const char* key : {"quantization_config", "compression_config"}) {
    if (const Json* found = member(config, key)) return found;
  }
  const Json* text = member(config, "text_config");
  return text == nullptr ? nullptr : member(*text, "quantization_config");
}

Status read_block(const Json& block, const char* key, Scheme& scheme) {
  const auto is_size = [](const Json& size) {
    return size.is_number_unsigned() && size.get<std::uint64_t>() >= 1 && size.get<std::uint64_t>() <= kBlockMax;
  };
  if (!block.is_array() || block.size() != 2 || !is_size(block[0]) || !is_size(block[1])) {
    return Error(Errc::layout_mismatch,
                 "config.json: quantization_config: " + std::string(key) + " is to be two sizes, not " + block.dump());
  }
  scheme.block.emplace(block[0].get<std::uint64_t>(), block[1].get<std::uint64_t>());
  return {};
}

Result<Scheme> read_fp8(const Json& said) {
  Scheme scheme;
  if (const std::string fmt = text_or(said, "fmt", "e4m3"); fmt != "e4m3") return unsupported("fmt '" + fmt + "'");
  if (const Json* block = member(said, "weight_block_size")) DS_TRY(read_block(*block, "weight_block_size", scheme));
  if (const std::string scale = text_or(said, "scale_fmt", ""); !scale.empty() && scale != "float") {
    if (scale != "ue8m0" || !scheme.block) return unsupported("scale_fmt '" + scale + "'");
    scheme.powers = true;
  }
  return scheme;
}

/// Of one group of layers.
Result<Scheme> read_weights(const Json& group, const std::string& name) {
  const Json* weights = member(group, "weights");
  if (weights == nullptr) return unsupported("'" + name + "' without weights");
  const std::string bits = text_or(*weights, "num_bits", "8");
  const std::string type = text_or(*weights, "type", "int");
  const std::string strategy = text_or(*weights, "strategy", "none");
  if (bits != "8" || type != "float") return unsupported(type + bits + " of '" + name + "'");
  if (text_or(*weights, "symmetric", "true") != "true" || text_or(*weights, "dynamic", "false") != "false") {
    return unsupported("asymmetric or dynamic weights of '" + name + "'");
  }
  Scheme scheme;
  if (strategy == "block") {
    const Json* block = member(*weights, "block_structure");
    DS_TRY(read_block(block == nullptr ? Json() : *block, "block_structure", scheme));
  } else if (strategy != "tensor") {
    return unsupported("strategy '" + strategy + "' of '" + name + "'");
  }
  return scheme;
}

Result<Scheme> read_compressed(const Json& said) {
  const Json* groups = member(said, "config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty())
    return unsupported("compressed-tensors without groups");
  std::optional<Scheme> scheme;
  for (const auto& [name, group] : groups->items()) {
    DS_ASSIGN(Scheme one, read_weights(group, name));
    if (scheme && scheme->block != one.block) return unsupported("groups with different schemes, as '" + name + "',");
    scheme = std::move(one);
  }
  return *std::move(scheme);
}

Result<Scheme> read_scheme(const Json& said) {
  const std::string method = text_or(said, "quant_method", "none");
  if (method != "fp8" && method != "compressed-tensors") return unsupported("'" + method + "'");
  DS_ASSIGN(Scheme scheme, method == "fp8" ? read_fp8(said) : read_compressed(said));
  for (const char* key : {"modules_to_not_convert", "ignored_layers", "ignore"}) {
    const Json* names = member(said, key);
    if (names == nullptr || !names->is_array()) continue;
    for (const Json& name : *names) {
      // Expressions ("re:…") are Python's: what they say of the directory is not compared.
      if (name.is_string() && !name.get<std::string>().starts_with("re:")) {
        scheme.unquantised.insert(name.get<std::string>());
      }
    }
  }
  return scheme;
}

/// What of `names` is a module that this tensor is of: whole words of its name, from point to point.
std::optional<std::string> named_in(const std::set<std::string, std::less<>>& names, std::string_view tensor) {
  std::vector<std::size_t> begins{0};
  for (std::size_t i = 0; i < tensor.size(); ++i) {
    if (tensor[i] == '.') begins.push_back(i + 1);
  }
  begins.push_back(tensor.size() + 1);
  if (names.empty() || begins.size() > kWordsMax) return std::nullopt;
  for (std::size_t from = 0; from + 1 < begins.size(); ++from) {
    for (std::size_t to = from + 1; to < begins.size(); ++to) {
      const auto found = names.find(tensor.substr(begins[from], begins[to] - 1 - begins[from]));
      if (found != names.end()) return *found;
    }
  }
  return std::nullopt;
}

std::uint64_t blocks(std::uint64_t size, std::uint64_t of) {
  return size / of + (size % of != 0 ? 1 : 0);
}

Error mismatch(const std::string& what) {
  return Error(Errc::layout_mismatch, what);
}

Status check_scales(const TensorSpec& tensor, const TensorSpec& scale, const Scheme& scheme) {
  if (scheme.block) {
    const auto [rows, cols] = *scheme.block;
    const std::vector<std::uint64_t> wanted{blocks(tensor.shape[0], rows), blocks(tensor.shape[1], cols)};
    if (scale.shape != wanted) {
      return mismatch(scale.name + " has " + shape_text(scale.shape) + ", and blocks of " + std::to_string(rows) +
                      " x " + std::to_string(cols) + " of " + tensor.name + " " + shape_text(tensor.shape) + " have " +
                      shape_text(wanted));
    }
  } else if (!scale.shape.empty() && scale.shape != std::vector<std::uint64_t>{1}) {
    return mismatch(scale.name + " has " + shape_text(scale.shape) +
                    ", and config.json says that a tensor has one scale (no weight_block_size)");
  }
  const bool exponents = scale.dtype == Dtype::f8_e8m0;
  if (exponents ? !scheme.block : scale.dtype != Dtype::f32 && scale.dtype != Dtype::bf16) {
    return Error(Errc::unsupported, scale.name + ": scales in " + std::string(to_string(scale.dtype)));
  }
  return {};
}

class Reader {
 public:
  Reader(const Layout& layout, const Scheme* scheme) : layout_(layout), scheme_(scheme) {}

  Status take(std::uint32_t index) {
    const TensorSpec& tensor = layout_.tensors()[index].spec;
    if (tensor.dtype != Dtype::f8_e4m3) return {};
    if (scheme_ == nullptr) {
      return mismatch(tensor.name + " is F8_E4M3, and config.json has no quantization_config, which says how");
    }
    if (const auto module = named_in(scheme_->unquantised, tensor.name)) {
      return mismatch(tensor.name + " is F8_E4M3, and config.json says that '" + *module + "' is not quantised");
    }
    if (tensor.shape.size() != 2) {
      return Error(Errc::unsupported, tensor.name + " " + shape_text(tensor.shape) +
                                          ": quantised tensors of other than two dimensions are not exported");
    }
    DS_ASSIGN(const std::uint32_t scale, scale_of(tensor.name));
    const TensorSpec& scales = layout_.tensors()[scale].spec;
    DS_TRY(check_scales(tensor, scales, *scheme_));
    const auto block = scheme_->block.value_or(std::pair{tensor.shape[0], tensor.shape[1]});
    made_.tensors.push_back({.tensor = index,
                             .scale = scale,
                             .by_block = scheme_->block.has_value(),
                             .block_rows = block.first,
                             .block_cols = block.second,
                             .powers_of_two = scheme_->powers || scales.dtype == Dtype::f8_e8m0});
    const std::size_t dot = tensor.name.rfind('.');
    if (dot == std::string::npos) return {};
    if (const auto input = layout_.find(tensor.name.substr(0, dot) + ".input_scale")) {
      made_.activations.push_back(*input);
    }
    return {};
  }

  Quantisation done() { return std::move(made_); }

 private:
  Result<std::uint32_t> scale_of(const std::string& tensor) const {
    const auto inverse = layout_.find(tensor + "_scale_inv");
    const auto plain = layout_.find(tensor + "_scale");
    if (inverse && plain) return mismatch(tensor + " has two tensors of scales, _scale_inv and _scale");
    if (inverse) return *inverse;
    if (plain) return *plain;
    return mismatch(tensor + " is F8_E4M3, and the directory has neither " + tensor + "_scale_inv nor _scale");
  }

  const Layout& layout_;
  const Scheme* scheme_;  ///< none: config.json says nothing
  Quantisation made_;
};

}  // namespace

Result<Quantisation> quantisation_of(const Json& config, const Layout& layout) {
  const Json* said = config_in(config);
  std::optional<Scheme> scheme;
  if (said != nullptr) {
    DS_ASSIGN(scheme, read_scheme(*said));
  }
  Reader reader(layout, scheme ? &*scheme : nullptr);
  for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) DS_TRY(reader.take(i));
  Quantisation made = reader.done();
  if (scheme && made.tensors.empty()) {
    return mismatch(
        "config.json has a quantization_config, and the directory no tensor of F8_E4M3: remove the one, or "
        "give the directory that was quantised");
  }
  return made;
}

}  // namespace deltasync::exporting
