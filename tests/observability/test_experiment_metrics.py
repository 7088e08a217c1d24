"""Statistics have their documented names, and the page of the documentation is generated from them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from areno.observability.experiment_metrics import documented, with_short_names
from areno.observability.stats_logger import StatsLogger
from areno.storage.run_dir import RunDirectory

REPO = Path(__file__).parents[2]

# Written by hand from the documentation; braces expand to each of the names in them.
NAMES = """
ppo_actor/{task_reward,advantages,kl_rewards,final_reward,no_eos_ratios,prompt_len,seq_len,correct_seq_len}/{avg,min,max}
ppo_actor/incorrect_seq_len/{avg,min,max}
ppo_actor/{n_seqs,n_tokens,n_valid_tokens,correct_n_seqs,incorrect_n_seqs,eps_clip,c_clip,use_dual_clip,rs_upper,rs_lower}
ppo_actor/mask_no_eos_with_zero
ppo_actor/update/{importance_weight,approx_kl,new_logp,old_logp,entropy,actor_loss,clip_ratio,dual_clip_ratio}/{avg,min,max}
ppo_actor/update/{behave_imp_weight,behave_approx_kl,clipped_new_logp,clipped_old_logp,rkl_loss}/{avg,min,max}
ppo_actor/update/{vocab_min_logits,vocab_max_logits,sapo_soft_gate,sapo_scaled_gate_pos,sapo_scaled_gate_neg}/{avg,min,max}
ppo_actor/update/{unclipped_behave_tokens,clipped_tokens,rs_filtered_fraction,grad_norm,lr,update_successful,num_micro_batches}
ppo_actor/update/compute_logp/{prox_logp_gt,kl_div_direct,kl_div_taylor,kl_div_dual}/{avg,min,max}
ppo_actor/update/compute_logp/{loglinear,linear,rollout}/{approx_logp,behave_imp_weight,importance_weight}/{avg,min,max}
ppo_actor/update/compute_logp/{loglinear,linear,rollout}/{abs_error,rel_error,squared_error}/{avg,min,max}
ppo_actor/update/version_stats/sample_staleness_{proximal,theta}_{avg,max,min}
ppo_actor/update/version_stats/{v_theta,v_proximal,n_valid_generated_tokens}
ppo_critic/{new_value,old_value,target_value,critic_loss,clip_ratio}/{avg,min,max}
sft/{loss,ppl}/{avg,min,max}
sft/{n_seqs,n_tokens,n_valid_tokens,prompt_tokens}
rw/{correct_ratio,pos_score,neg_score,loss}/{avg,min,max}
rw/n_pairs
dpo/{loss,chosen_reward,rejected_reward,reward_accuracy,reward_margin}/{avg,min,max}
{rollout,eval-rollout}/{accepted,rejected}
{rollout,eval-rollout}/{reward,num_turns}/{avg,min,max}
timeperf/{rollout,critic_values,ref_logp,teacher_logp,recompute_logp,compute_advantage,train_step,critic_train_step}
timeperf/{update_weights,save,checkpoint_for_recover,eval,rollout_pause}
"""


def expanded(pattern):
    braces = re.search(r"\{([^}]*)\}", pattern)
    if braces is None:
        return [pattern]
    names = (pattern[: braces.start()] + one + pattern[braces.end() :] for one in braces[1].split(","))
    return [full for name in names for full in expanded(name)]


def test_every_documented_name_is_in_the_table_once():
    listed = [number for _, statistic in documented() for number in statistic.numbers]
    assert len(listed) == len(set(listed))
    wanted = {name for line in NAMES.split() for name in expanded(line)}
    assert len(wanted) > 150
    assert wanted - set(listed) == set()


def test_short_names_of_the_quickstart_appear_next_to_the_full_names(tmp_path):
    numbers = {
        "ppo_actor/task_reward/avg": 0.5,
        **{
            f"ppo_actor/update/{name}/avg": value
            for name, value in (("importance_weight", 1.0), ("clip_ratio", 0.25), ("actor_loss", -0.125))
        },
    }
    run_dir = RunDirectory(tmp_path).create()
    StatsLogger(run_dir, total_epochs=1, steps_per_epoch=1).commit(0, 0, 0, numbers)
    (record,) = run_dir.read_metrics()
    quickstart = ("task_reward", "importance_weight", "actor_clip_ratio", "actor_loss")
    assert [record[f"ppo_actor/{name}/avg"] for name in quickstart] == [0.5, 1.0, 0.25, -0.125]
    assert with_short_names({"rw/loss/avg": 1.0}) == {"rw/loss/avg": 1.0}
    turns = {"rollout/num_turns/avg": 1.5, "rollout/num_turns/max": 2.0}
    assert with_short_names(turns) == {**turns, "rollout/num_turns": 1.5}


def test_the_page_is_up_to_date_with_make_statistics():
    spec = importlib.util.spec_from_file_location("make_statistics", REPO / "docs" / "make_statistics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python docs/make_statistics.py"
