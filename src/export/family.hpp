// A page of data: how the tensors of a trainer's model family become those of a HF directory.
//
//   name = "qwen3-moe"
//   architectures = ["Qwen3MoeForCausalLM"]     # of config.json
//   inherits = "llama"                          # its rows follow these
//   ignored = ["*._extra_state"]                # tensors of the trainer that are no part of the model
//   [sizes]                                     # names for expressions, over config.json's keys
//   hd = "head_dim | hidden_size / num_attention_heads"
//   [[rows]]
//   mcore = "decoder.layers.{L}.self_attention.linear_qkv.weight"      # or a list
//   parts = "G * [q: n * hd, k: hd, v: hd]"     # of dimension 0; D is its size
//   hf.q = "model.layers.{L}.self_attn.q_proj.weight"                  # or hf = "…" without parts
//   view = "(two f) h -> f two h"               # or view.q, of a part (element_map.hpp)
//   when = "attention_bias | false"
//   add = 1                                     # to each value
//   optional = true                             # the directory may be without it
//   alternative = "transposed"                  # a form that the directory may have, of which all rows go together: if
//                                               # it has no such tensor in that shape, the next row that matches counts
//   [[renames]]                                 # before rows are looked for, of names that begin so
//   mcore = "mtp.layers.{M}.transformer_layer."
//   to = "decoder.layers.{M}."
//   hf = "model.layers.{M}."                    # and what rows call so in the directory
//   hf_to = "mtp.layers.{M}."                   # begins so there
//   [[constants]]                               # taken from the directory as they are
//   hf = "model.layers.{L}.self_attn.rotary_emb.inv_freq"
//   [[aliases]]                                 # has the bytes of another one
//   hf = "lm_head.weight"
//   of = "model.embed_tokens.weight"
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync::exporting {

struct RowTarget {
  std::string part;  ///< empty: without parts
  std::string hf;
  std::string view;
};

struct FamilyRow {
  std::string label;  ///< "FAMILY:LINE"
  std::vector<std::string> mcore;
  std::string parts;
  std::vector<RowTarget> targets;
  std::string when;
  double add = 0;
  bool optional = false;
  std::string alternative;  ///< a form's name; empty: the row is of none
};

struct FamilyRename {
  std::string label;
  std::vector<std::string> mcore;  ///< how names begin
  std::string to;
  std::string hf;  ///< how the rows' names in the directory begin, and how they begin instead
  std::string hf_to;
};

struct FamilyConstant {
  std::string hf;
  std::string when;
};

struct FamilyAlias {
  std::string hf;
  std::string of;
  std::string when;
};

struct Family {
  std::string name;
  std::string inherits;
  std::vector<std::string> architectures;
  std::vector<std::string> ignored;
  std::map<std::string, std::string, std::less<>> sizes;
  std::vector<FamilyRename> renames;  ///< the first that fits
  std::vector<FamilyRow> rows;        ///< the first that matches a tensor is its
  std::vector<FamilyConstant> constants;
  std::vector<FamilyAlias> aliases;
};

/// `file`: for messages, which say "FILE:LINE: …".
///   - Errc::invalid_argument: no TOML, a key that is not known, or one that is missing.
Result<Family> parse_family(std::string_view toml, std::string_view file);

/// The pages that come with deltasync: name and text.
std::span<const std::pair<std::string_view, std::string_view>> builtin_families();

/// The page for a model, with all that it inherits: of `given`, which come first, and of those that come with
/// deltasync. `architectures`: config.json's.
///   - Errc::not_found: no page for it; the message names those that there are.
///   - Errc::invalid_argument: a page that inherits from itself, or from one that is not there; pages of `given`
///     that are for other architectures, and from which nothing is inherited, by name.
Result<Family> find_family(std::span<const Family> given, std::span<const std::string> architectures);

}  // namespace deltasync::exporting
