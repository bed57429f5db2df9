# The values that DiffusionDPO publishes for SD 1.5, as a launcher states them; read by the tests, never run.
export MODEL="runwayml/stable-diffusion-v1-5"
export PAIRS="yuvalkirstain/pickapic_v2"

accelerate launch train.py \
  --pretrained_model_name_or_path=$MODEL --dataset_name=${PAIRS} \
  --train_batch_size=1 --gradient_accumulation_steps=128 --dataloader_num_workers=16 \
  --max_train_steps=2000 --lr_scheduler="constant_with_warmup" --lr_warmup_steps=500 \
  --learning_rate=1e-8 --scale_lr --checkpointing_steps 500 --beta_dpo 5000 \
  --cache_dir="/data/pairs/" --output_dir="tmp-sd15"
