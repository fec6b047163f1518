#include "bench/moe_shards.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace deltasync::bench {
namespace {

constexpr std::uint64_t kExperts = 16;
constexpr std::uint64_t kHeads = 16;
constexpr std::uint64_t kGroups = kExportRanks;  // of query heads: one a rank
constexpr std::uint64_t kVocabularyToHidden = 8;

using Shape = std::vector<std::uint64_t>;

class Maker {
 public:
  explicit Maker(std::uint64_t hidden) : hidden_(hidden), head_(hidden / kHeads), ffn_(hidden / 2) {
    out_.pieces.resize(kExportRanks);
    out_.at.resize(kExportRanks);
  }

  std::uint64_t layer_bytes() const { return 2 * hidden_ * (3 * kExperts * ffn_ + 3 * hidden_); }

  MoeShards make(std::uint64_t layers) && {
    const std::uint64_t vocabulary = kVocabularyToHidden * hidden_;
    hf("model.embed_tokens.weight", {vocabulary, hidden_});
    cut("embedding.word_embeddings.weight", {vocabulary, hidden_}, 0);
    for (std::uint64_t i = 0; i < layers; ++i) {
      layer("model.layers." + std::to_string(i) + ".", "decoder.layers." + std::to_string(i) + ".");
    }
    hf("model.norm.weight", {hidden_});
    replicate("decoder.final_layernorm.weight", {hidden_});
    hf("lm_head.weight", {vocabulary, hidden_});
    cut("output_layer.weight", {vocabulary, hidden_}, 0);
    out_.config = nlohmann::json{
        {"architectures", {"Qwen3MoeForCausalLM"}},
        {"hidden_size", hidden_},
        {"num_attention_heads", kHeads},
        {"num_key_value_heads", kGroups},
        {"head_dim", head_},
        {"vocab_size", vocabulary},
        {"tie_word_embeddings",
         false}}.dump();
    return std::move(out_);
  }

 private:
  void layer(const std::string& to, const std::string& from) {
    hf(to + "input_layernorm.weight", {hidden_});
    replicate(from + "self_attention.linear_qkv.layer_norm_weight", {hidden_});
    hf(to + "self_attn.q_proj.weight", {hidden_, hidden_});
    hf(to + "self_attn.k_proj.weight", {kGroups * head_, hidden_});
    hf(to + "self_attn.v_proj.weight", {kGroups * head_, hidden_});
    cut(from + "self_attention.linear_qkv.weight", {hidden_ + 2 * kGroups * head_, hidden_}, 0);
    hf(to + "self_attn.o_proj.weight", {hidden_, hidden_});
    cut(from + "self_attention.linear_proj.weight", {hidden_, hidden_}, 1);
    hf(to + "post_attention_layernorm.weight", {hidden_});
    replicate(from + "pre_mlp_layernorm.weight", {hidden_});
    hf(to + "mlp.gate.weight", {kExperts, hidden_});
    replicate(from + "mlp.router.weight", {kExperts, hidden_});
    for (std::uint64_t e = 0; e < kExperts; ++e) {
      const std::string expert = "experts." + std::to_string(e) + ".";
      const auto owner = static_cast<std::uint32_t>(e * kExportRanks / kExperts);
      hf(to + "mlp." + expert + "gate_proj.weight", {ffn_, hidden_});
      hf(to + "mlp." + expert + "up_proj.weight", {ffn_, hidden_});
      give(owner, from + "mlp.experts." + expert + "linear_fc1.weight", {2 * ffn_, hidden_}, {0, 0},
           {2 * ffn_, hidden_});
      hf(to + "mlp." + expert + "down_proj.weight", {hidden_, ffn_});
      give(owner, from + "mlp.experts." + expert + "linear_fc2.weight", {hidden_, ffn_}, {0, 0}, {hidden_, ffn_});
    }
  }

  void hf(std::string name, Shape shape) {
    out_.specs.push_back({.name = std::move(name), .dtype = Dtype::bf16, .shape = std::move(shape)});
  }
  /// An equal share of a dimension for each rank.
  void cut(const std::string& key, const Shape& whole, std::size_t dim) {
    for (std::uint32_t rank = 0; rank < kExportRanks; ++rank) {
      Shape offset(whole.size());
      Shape shape = whole;
      shape[dim] = whole[dim] / kExportRanks;
      offset[dim] = rank * shape[dim];
      give(rank, key, whole, std::move(offset), std::move(shape));
    }
  }
  void replicate(const std::string& key, const Shape& whole) {
    for (std::uint32_t rank = 0; rank < kExportRanks; ++rank) give(rank, key, whole, Shape(whole.size()), whole);
  }
  void give(std::uint32_t rank, const std::string& key, const Shape& whole, Shape offset, Shape shape) {
    std::uint64_t bytes = 2;
    for (const std::uint64_t size : shape) bytes *= size;
    out_.at[rank].push_back(out_.bytes);
    out_.bytes += (bytes + 255) / 256 * 256;  // as allocators of trainers begin them
    out_.pieces[rank].push_back({.key = key,
                                 .dtype = Dtype::bf16,
                                 .global_shape = whole,
                                 .offset = std::move(offset),
                                 .shape = std::move(shape)});
  }

  const std::uint64_t hidden_;
  const std::uint64_t head_;
  const std::uint64_t ffn_;
  MoeShards out_;
};

}  // namespace

MoeShards moe_shards(std::uint64_t model_bytes) {
  std::uint64_t hidden = 2048;  // at least eight layers, down to what heads of a few elements allow
  while (hidden > 128 && 8 * Maker(hidden).layer_bytes() > model_bytes) hidden /= 2;
  Maker maker(hidden);
  const std::uint64_t embeddings = 2 * 2 * kVocabularyToHidden * hidden * hidden;
  const std::uint64_t rest = model_bytes > embeddings ? model_bytes - embeddings : 0;
  return std::move(maker).make(std::max<std::uint64_t>(1, (rest + maker.layer_bytes() / 2) / maker.layer_bytes()));
}

}  // namespace deltasync::bench
