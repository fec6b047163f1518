"""`deltasync export-plan`: the plan applied, and what is said of shards and pages that do not fit."""

import json
import pathlib
import unittest

from cli_support import MISSING, NOT_VERIFIED, USAGE, VERSION, CliTest, write_model

PAGE = pathlib.Path(__file__).parents[2] / "docs/reference/export.md"
HIDDEN, FFN, WORDS = 4, 3, 5
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 2, "vocab_size": WORDS, "tie_word_embeddings": True}
LAYER = "model.layers.0."
TARGETS = {"model.embed_tokens.weight": [WORDS, HIDDEN], "model.norm.weight": [HIDDEN],
           LAYER + "input_layernorm.weight": [HIDDEN], LAYER + "self_attn.q_proj.weight": [4, HIDDEN],
           LAYER + "self_attn.k_proj.weight": [2, HIDDEN], LAYER + "self_attn.v_proj.weight": [2, HIDDEN],
           LAYER + "self_attn.o_proj.weight": [HIDDEN, 4], LAYER + "post_attention_layernorm.weight": [HIDDEN],
           LAYER + "mlp.gate_proj.weight": [FFN, HIDDEN], LAYER + "mlp.up_proj.weight": [FFN, HIDDEN],
           LAYER + "mlp.down_proj.weight": [HIDDEN, FFN]}
OWN = "decoder.layers.0."
TRAINER = {"embedding.word_embeddings.weight": [8, HIDDEN], "decoder.final_layernorm.weight": [HIDDEN],
           OWN + "self_attention.linear_qkv.layer_norm_weight": [HIDDEN],
           OWN + "self_attention.linear_qkv.weight": [8, HIDDEN], OWN + "self_attention.linear_proj.weight": [HIDDEN, 4],
           OWN + "mlp.linear_fc1.layer_norm_weight": [HIDDEN], OWN + "mlp.linear_fc1.weight_w": [FFN, HIDDEN],
           OWN + "mlp.linear_fc1.weight_v": [FFN, HIDDEN], OWN + "mlp.linear_fc2.weight": [HIDDEN, FFN]}


def model_dir(path, config=CONFIG):
    tensors = {}
    for name, shape in TARGETS.items():
        elements = shape[0] * (shape[1] if len(shape) == 2 else 1)
        tensors[name] = ("F32", shape, bytes(4 * elements))
    return write_model(path, tensors, config=json.dumps(config))


class ExportPlanTest(CliTest):
    def setUp(self):
        super().setUp()
        self.hf = model_dir(self.tmp / "model")
        self.plan = self.tmp / "plan.json"

    def shards(self, tensors=TRAINER):
        """Two ranks, each with a half of the rows, or all of what has one row."""
        files = []
        for rank in range(2):
            pieces = []
            for key, shape in tensors.items():
                half = shape[0] // 2
                begin, rows = (0, half) if rank == 0 else (half, shape[0] - half)
                pieces.append({"key": key, "dtype": "F32", "global_shape": shape,
                               "offset": [begin] + [0] * (len(shape) - 1), "shape": [rows] + shape[1:]})
            files.append(self.tmp / f"rank{rank}.json")
            files[-1].write_text(json.dumps({"rank": rank, "pieces": pieces}))
        return files

    def test_the_plan_says_where_each_element_comes_from(self):
        files = self.shards()
        self.cli("export-plan", "--hf", self.hf, "--shards", *files, "--json", self.plan)
        self.assertIn("family llama: 11 tensors of 2 ranks", self.out)
        plan = json.loads(self.plan.read_text())
        ranks = [json.loads(file.read_text())["pieces"] for file in files]
        for number, tensor in enumerate(plan["tensors"]):
            size = 1
            for n in tensor["shape"]:
                size *= n
            found = [None] * size
            for copy in (copy for copy in plan["copies"] if copy["tensor"] == number):
                piece = ranks[copy["rank"]][copy["piece"]]
                places = [(copy["source_offset"], copy["target_offset"])]
                for count, source, target in zip(copy["counts"], copy["source_strides"], copy["target_strides"],
                                                 strict=True):
                    places = [(s + i * source, t + i * target) for s, t in places for i in range(count)]
                columns = piece["shape"][1] if len(piece["shape"]) == 2 else 1
                for source, target in places:
                    self.assertIsNone(found[target])
                    found[target] = (piece["key"], piece["offset"][0] + source // columns, source % columns)
            columns = tensor["shape"][1] if len(tensor["shape"]) == 2 else 1
            key = self.key_of(tensor["name"])
            for i, element in enumerate(found):
                first = {"k_proj": 4, "v_proj": 6}.get(tensor["name"].split(".")[-2], 0)
                self.assertEqual(element, (key, first + i // columns, i % columns), tensor["name"])

    @staticmethod
    def key_of(name):
        if "_proj" in name and "self_attn" in name and "o_proj" not in name:
            return OWN + "self_attention.linear_qkv.weight"
        return {"model.embed_tokens.weight": "embedding.word_embeddings.weight",
                "model.norm.weight": "decoder.final_layernorm.weight",
                LAYER + "input_layernorm.weight": OWN + "self_attention.linear_qkv.layer_norm_weight",
                LAYER + "self_attn.o_proj.weight": OWN + "self_attention.linear_proj.weight",
                LAYER + "post_attention_layernorm.weight": OWN + "mlp.linear_fc1.layer_norm_weight",
                LAYER + "mlp.gate_proj.weight": OWN + "mlp.linear_fc1.weight_w",
                LAYER + "mlp.up_proj.weight": OWN + "mlp.linear_fc1.weight_v",
                LAYER + "mlp.down_proj.weight": OWN + "mlp.linear_fc2.weight"}[name]

    def test_what_is_left_over(self):
        files = self.shards({key: shape for key, shape in TRAINER.items() if "linear_fc2" not in key} | {"more": [2]})
        self.cli("export-plan", "--hf", self.hf, "--shards", *files, expect=NOT_VERIFIED)
        self.assertIn("down_proj", self.err)
        self.assertIn("no row is for: more", self.err)

    def test_ranks_that_are_missing_or_twice(self):
        files = self.shards()
        self.cli("export-plan", "--hf", self.hf, "--shards", files[1], expect=USAGE)
        self.assertIn("give those of all ranks", self.err)
        self.cli("export-plan", "--hf", self.hf, "--shards", files[0], files[0], expect=USAGE)
        self.assertIn("both of rank 0", self.err)
        self.cli("export-plan", "--hf", self.hf, "--shards", self.tmp / "none.json", expect=MISSING)

    def test_a_page_of_ones_own(self):
        page = self.tmp / "mine.toml"
        text = PAGE.read_text()
        page.write_text(text.split("```toml\n")[1].split("```")[0])
        model_dir(self.hf, CONFIG | {"architectures": ["MineForCausalLM"]})
        files = self.shards()
        self.cli("export-plan", "--hf", self.hf, "--shards", *files, expect=MISSING)
        self.assertIn("MineForCausalLM", self.err)
        self.cli("export-plan", "--hf", self.hf, "--shards", *files, "--family", page, "--json", self.plan)
        self.assertIn("family mine", self.out)
        page.write_text("name = \"mine\"\nrow = 1")
        self.cli("export-plan", "--hf", self.hf, "--shards", *files, "--family", page, expect=USAGE)
        self.assertIn("mine.toml:2: no key 'row'", self.err)

    def test_a_page_that_comes_along_by_its_name(self):
        model_dir(self.hf, CONFIG | {"architectures": ["MineForCausalLM"]})
        files = self.shards()
        self.cli("export-plan", "--hf", self.hf, "--shards", *files, "--family", "llama", "--json", self.plan)
        self.assertIn("family llama", self.out)
        self.cli("export-plan", "--hf", self.hf, "--shards", *files, "--family", "lama", expect=MISSING)
        self.assertIn("lama", self.err)
        self.assertIn("qwen3-moe", self.err)

    def test_the_shards_of_the_page_are_read(self):
        shard = self.tmp / "shard.json"
        shard.write_text(PAGE.read_text().split("```json\n")[1].split("```")[0])
        self.cli("export-plan", "--hf", self.hf, "--shards", shard, expect=VERSION)
        self.assertIn("decoder.final_layernorm.weight: it makes [64]", self.err)


if __name__ == "__main__":
    unittest.main()
