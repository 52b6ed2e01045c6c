#!/usr/bin/env bash
# What the results of a GPU come from, stage by stage, each bounded; about 15 minutes of an H100:
#     bench/all.sh tests texts sanitizer rounds others experts loops embedded curve steps timeline kernels prompts
# Results are written into bench/results, or into $OUT, named after CARD (h100). Exit code 1 when a stage failed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
card="${CARD:-h100}"
python="${PYTHON:-python3}"
failed=0

within() {  # seconds, script, arguments
    local seconds="$1"
    shift
    timeout "$seconds" "$python" "bench/$1.py" "${@:2}"
}

lossless() { within 300 lossless --backend cuda --verify all --seconds 270 "$@"; }

texts() {  # in processes side by side: one interpreter leaves a GPU idle
    local pairs="dflash-qwen3-trained dflash-qwen3-tiny dflash-qwen3-swa-tiny dflash-llama-tiny" jobs=() activations
    for activations in bf16 f32; do
        # shellcheck disable=SC2086
        lossless --activations "$activations" --seeds 200 --tokens 40 --blocks 16 --chunks 64 --pairs $pairs \
            --jobs 4 --name "lossless-sampled-golden-$activations-$card" & jobs+=($!)
    done
    lossless --activations bf16 --prompts 50 --tokens 512 --chunks 2048 --jobs 4 --name "lossless-embedded-$card" & jobs+=($!)
    lossless --activations bf16 --seeds 50 --tokens 128 --blocks 16 --chunks 2048 --jobs 2 \
        --name "lossless-sampled-$card" & jobs+=($!)
    within 300 gpu_check --only pair tau --seconds 270 --name "gpu-check-pair-$card" & jobs+=($!)
    local job status=0
    for job in "${jobs[@]}"; do wait "$job" || status=1; done
    return "$status"
}

for stage in "$@"; do
    case "$stage" in
    tests) within 570 gpu_check --only kernels golden sampling --jobs 15 --seconds 540 --name "gpu-check-kernels-$card" ;;
    texts) texts ;;
    sanitizer) within 400 sanitize --jobs 15 --most 8 --seconds 130 --name "sanitizer-$card" ;;
    rounds) within 240 round --shapes qwen3-8b --lossless 2000 --name "round-$card" ;;
    others) within 120 round --shapes smollm2-135m qwen3-4b llama-3.1-8b --contexts 512 2048 --name "round-others-$card" ;;
    experts) within 60 experts && within 120 moe --name "moe-$card" && within 60 host_memory --name "host-memory-$card" ;;
    loops) within 100 loops --name "loops-$card" ;;
    embedded) within 100 embedded --name "embedded-$card" ;;
    curve) within 400 curve --backend cuda --name "curve-$card" ;;
    steps) within 100 steps --name "steps-$card" && within 100 wide --name "wide-$card" ;;
    timeline) within 100 timeline --shapes qwen3-8b smollm2-135m --card "$card" ;;
    kernels) within 250 kernels && within 100 attend --rows 1,16 --replays 4 --seconds 60 ;;
    prompts) within 100 prefill_gemm --rows 512,2048 --frames wgmma --seconds 70 --name "prefill-gemm-$card" ;;
    *) echo "no stage $stage" >&2; false ;;
    esac || { failed=1; echo "$stage failed" >&2; }
done
exit "$failed"
