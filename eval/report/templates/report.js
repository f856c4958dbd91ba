"use strict";
// Enlarges a picture; left and right step through its neighbours in place, so that differences blink.
(() => {
  const dialog = document.querySelector("dialog");
  if (!dialog) return;
  const [image, label, prompt, twice] = ["img", ".label", ".what", ".twice"].map((name) => dialog.querySelector(name));
  let shots = [], at = 0, opener = null;

  const show = (index) => {
    at = (index + shots.length) % shots.length;
    const source = shots[at].querySelector("img");
    image.src = source.src;
    image.alt = source.alt;
    image.classList.toggle("pixels", source.naturalWidth < 400);
    label.textContent = `${shots[at].dataset.label} · ${at + 1} of ${shots.length}`;
    prompt.textContent = shots[at].dataset.prompt;
  };
  const enlarge = (on) => {
    dialog.classList.toggle("twice", on);
    twice.setAttribute("aria-pressed", String(on));
  };

  document.addEventListener("click", (event) => {
    const shot = event.target.closest(".shot");
    if (!shot) return;
    opener = shot;
    shots = [...shot.closest(".shots").querySelectorAll(".shot")];
    enlarge(false);
    show(shots.indexOf(shot));
    dialog.showModal();
    dialog.querySelector(".close").focus();
  });
  // The event comes late: a picture enlarged meanwhile keeps the focus.
  dialog.addEventListener("close", () => dialog.open || (shots[at] ?? opener).focus());
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && !dialog.classList.contains("twice")) show(at + step);
    else if (event.key === "z" || event.key === "+" || event.key === "-") enlarge(!dialog.classList.contains("twice"));
    else return;
    event.preventDefault();
  });
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
  dialog.querySelector(".previous").addEventListener("click", () => show(at - 1));
  dialog.querySelector(".next").addEventListener("click", () => show(at + 1));
  twice.addEventListener("click", () => enlarge(!dialog.classList.contains("twice")));
  image.addEventListener("click", () => enlarge(!dialog.classList.contains("twice")));
})();
