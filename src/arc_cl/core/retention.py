"""Retention: cross-entropy with the pseudo-label, plus entropy (paper §3.3), and their gradient.

With p = softmax(z), q the (smoothed) pseudo-label and H = -Σ p log p:

    L_CE = -Σ q log p      ∂L_CE/∂z = p - q
    L_EM = H               ∂L_EM/∂z = -p (log p + H)

Masked classes (z = -inf) have p = 0, no share of the smoothing, and gradient 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arc_cl.core.detection import at_least_float32
from arc_cl.core.settings import ARCSettings


def losses_in_use(settings: ARCSettings) -> tuple[bool, bool]:
    """(cross-entropy, entropy). With both off it is cross-entropy, as in the released code."""
    return settings.cross_entropy or not settings.entropy, settings.entropy


def pseudo_labels(logits_BK: Tensor, labels_B: Tensor, smoothing: float) -> Tensor:
    """q: 1-ε on the label, ε shared evenly by the other open classes."""
    open_BK = logits_BK != -torch.inf
    others_B1 = open_BK.sum(dim=1, keepdim=True).to(logits_BK.dtype) - 1
    spread_B1 = smoothing * (others_B1 > 0).to(logits_BK.dtype)
    q_BK = spread_B1 / others_B1.clamp(min=1) * open_BK
    return q_BK.scatter(1, labels_B[:, None], 1 - spread_B1)


def retention_loss(logits_BK: Tensor, labels_B: Tensor, settings: ARCSettings) -> Tensor:
    """The loss of each row [B]; autograd goes through it, ARC itself uses `retention_gradient`."""
    logits_BK = at_least_float32(logits_BK)
    use_cross_entropy, use_entropy = losses_in_use(settings)
    log_p_BK = logits_BK.log_softmax(dim=1)
    # 0 · -inf is 0 here: a masked class adds nothing to either sum.
    finite_BK = log_p_BK.masked_fill(log_p_BK == -torch.inf, 0.0)
    loss_B = torch.zeros_like(log_p_BK[:, 0])
    if use_cross_entropy:
        q_BK = pseudo_labels(logits_BK.detach(), labels_B, settings.label_smoothing)
        loss_B = loss_B - (q_BK * finite_BK).sum(dim=1)
    if use_entropy:
        loss_B = loss_B - (log_p_BK.exp() * finite_BK).sum(dim=1)
    return loss_B


def retention_gradient(logits_BK: Tensor, labels_B: Tensor, settings: ARCSettings) -> Tensor:
    """∂L/∂z of each row [B,K], in closed form."""
    logits_BK = at_least_float32(logits_BK)
    use_cross_entropy, use_entropy = losses_in_use(settings)
    log_p_BK = logits_BK.log_softmax(dim=1)
    p_BK = log_p_BK.exp()
    finite_BK = log_p_BK.masked_fill(log_p_BK == -torch.inf, 0.0)
    gradient_BK = torch.zeros_like(p_BK)
    if use_cross_entropy:
        gradient_BK += p_BK - pseudo_labels(logits_BK, labels_B, settings.label_smoothing)
    if use_entropy:
        negative_entropy_B1 = (p_BK * finite_BK).sum(dim=1, keepdim=True)
        gradient_BK -= p_BK * (finite_BK - negative_entropy_B1)
    return gradient_BK
