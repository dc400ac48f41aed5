// The panel of the batches that this router runs.

import { bar, count, h, lasting, row, share, sync } from "./draw.js";

export function batches(now) {
  document.querySelector("#batched").hidden = !now.batches.length;
  const cells = (batch) => {
    const done = batch.succeeded + batch.failed;
    const part = batch.total ? done / batch.total : 0;
    const left = batch.seconds_left === null ? h("span", { class: "dim" }, "not known yet") : `about ${lasting(batch.seconds_left)}`;
    return [
      h("strong", {}, batch.tenant), [batch.id, h("small", {}, batch.api)], batch.status,
      h("span", { class: "meter" }, bar(part, { width: 120 }), share(part)), count(batch.total), count(batch.succeeded),
      batch.failed ? h("span", { class: "bad" }, `✕ ${count(batch.failed)}`) : count(0), left, `in ${lasting(batch.expires_in_s)}`,
    ];
  };
  sync(document.querySelector("#batches tbody"), now.batches, (batch) => batch.id, () => row(cells, ["", "", "", "", "n", "n", "n", "", ""]));
}
